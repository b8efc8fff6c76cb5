package guestapi

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestIdentityIsOneFlatDocument(t *testing.T) {
	id := Identity{Hostname: "box-1", MachineID: "0a", Generation: 7, Entropy: []byte{1, 2, 3}, UnixNano: 9}
	want := `{"hostname":"box-1","machine_id":"0a","generation":7,"entropy":"AQID","unix_nano":9}`
	for name, req := range map[string]any{"prepare": PrepareRequest(id), "renew": RenewRequest(id)} {
		if got, err := json.Marshal(req); err != nil || string(got) != want {
			t.Errorf("%s: %s, %v", name, got, err)
		}
	}
}

func TestHelloOfAGuestThatRunsHasNoFieldsNewToOlderHosts(t *testing.T) {
	if got, err := json.Marshal(HelloInfo{}); err != nil || strings.Contains(string(got), "frozen") {
		t.Errorf("%s, %v", got, err)
	}
}

func TestMostHooksWithTheLongestTextsFitIntoTheAnswer(t *testing.T) {
	info := RenewInfo{PhasesUS: map[string]int64{"reseed": 1 << 62, "clock": 1 << 62, "identity": 1 << 62, "hooks": 1 << 62, "thaw": 1 << 62}, HooksLeft: 1 << 20}
	for range MaxHooks {
		info.Hooks = append(info.Hooks, HookResult{
			Name: strings.Repeat("n", MaxHookText), Code: 255, Error: strings.Repeat("<", MaxHookText), // six bytes each in JSON
		})
	}
	data, err := json.Marshal(info)
	if err != nil || int64(len(data)) > Renew.MaxResponse {
		t.Fatalf("%d bytes, %v", len(data), err)
	}
	if got, err := Decode[RenewInfo](strings.NewReader(string(data)), Renew.MaxResponse); err != nil || len(got.Hooks) != MaxHooks {
		t.Errorf("%d hooks, %v", len(got.Hooks), err)
	}
}
