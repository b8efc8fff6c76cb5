package machine_test

import (
	"strings"
	"testing"

	"github.com/warren-vm/warren/internal/machine"
)

func TestAGuestThatSpoiltItsIdentityFilesCanBeCopied(t *testing.T) {
	m := create(t)
	tell(t, m, "rm /etc/machine-id; mkdir -p /etc/machine-id/x; mount -o remount,size=1m /run; head -c 2M /dev/zero > /run/full 2>/dev/null; ! echo more > /run/more")
	before := tell(t, m, "cat /run/warren/machine-id")
	c := restore(t, save(t, m).ID)
	if after := tell(t, c, "cat /run/warren/machine-id"); after == before || len(after) != 32 {
		t.Errorf("machine id %q, it was %q", after, before)
	}
	if got := tell(t, c, "ls /etc/machine-id"); got != "x" {
		t.Errorf("the folder in the link's place holds %q", got)
	}
	closeMachine(t, c)

	// Whose generation cannot be shown is not let run, and says why.
	tell(t, m, "rm /run/warren/generation; mkdir -p /run/warren/generation/x")
	c, err := machine.Restore(testContext(t), save(t, m).ID, options())
	if err == nil {
		closeMachine(t, c)
		t.Fatal("a copy runs without a generation")
	}
	if !strings.Contains(err.Error(), "/run/warren/generation") {
		t.Errorf("the error does not say what is in the way: %v", err)
	}
}
