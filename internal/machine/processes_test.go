package machine_test

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// descends says whether a process is a descendant of another.
func descends(pid string, of int) bool {
	for range 20 {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%s/stat", pid))
		if err != nil {
			return false
		}
		_, rest, _ := strings.Cut(string(data), ") ")
		fields := strings.Fields(rest)
		if len(fields) < 2 {
			return false
		}
		if parent, _ := strconv.Atoi(fields[1]); parent == of {
			return true
		}
		pid = fields[1]
	}
	return false
}
