// Command warren-guest is the agent inside a VM. It is the /init of the
// guest's initramfs and of no use anywhere else.
package main

import (
	"fmt"
	"os"

	"github.com/warren-vm/warren/internal/guest/boot"
)

func main() {
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "warren-guest: this is the first program of a VM and nothing to start by hand; try kosa8 run")
		os.Exit(2)
	}
	boot.Main()
}
