# make help lists what there is. Everything real is in scripts/ and in Go.

FUZZTIME ?= 30s

.PHONY: help build setup image run test lint fuzz soak bench clean

help: ## this list
	@sed -n 's/^\([a-z]*\):[^#]*## /  make \1	/p' $(MAKEFILE_LIST) | expand -t 16

setup: ## packages, programs and guest image: whatever is missing
	@scripts/setup

run: setup ## run a command in a microVM and show what happens
	@scripts/demo

test: setup lint ## all tests, real VMs included, then every fuzz target for FUZZTIME
	@go run scripts/testrun.go -fuzztime $(FUZZTIME)

build: ## the programs, into bin/
	@scripts/setup --programs

image: build ## the guest image, if the recipe or the agent changed
	@bin/kosa8 image build

lint: ## gofmt, vet, staticcheck
	@scripts/lint

fuzz: ## every fuzz target, longer with FUZZTIME=10m
	@go run scripts/testrun.go -tests=false -fuzztime $(FUZZTIME)

soak: setup ## the tests with their large counts; takes long
	@WARREN_SOAK=1 go run scripts/testrun.go -fuzz=false -timeout 4h

bench: setup ## the figures, beside plain QEMU
	@bin/kosa8 bench

clean: ## remove bin/; the guest image stays
	@rm -rf bin
