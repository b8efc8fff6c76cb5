package doctor

import "runtime"

// qemuProgram is the QEMU that runs guests of the host's own architecture.
var qemuProgram = "qemu-system-" + map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[runtime.GOARCH]
