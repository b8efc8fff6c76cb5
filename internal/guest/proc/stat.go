package proc

import (
	"bytes"
	"strconv"
)

// parseStat reads a line of /proc/PID/stat. The command name in it is the
// program's to choose and may hold anything, closing brackets and spaces
// included; the fields begin after the last bracket.
func parseStat(data []byte) (Stat, bool) {
	i := bytes.LastIndexByte(data, ')')
	if i < 0 {
		return Stat{}, false
	}
	f := bytes.Fields(data[i+1:])
	if len(f) < 4 || len(f[0]) != 1 {
		return Stat{}, false
	}
	parent, err1 := strconv.Atoi(string(f[1]))
	group, err2 := strconv.Atoi(string(f[2]))
	session, err3 := strconv.Atoi(string(f[3]))
	if err1 != nil || err2 != nil || err3 != nil {
		return Stat{}, false
	}
	return Stat{State: f[0][0], Parent: parent, Group: group, Session: session}, true
}
