package accel

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"time"
)

// cache remembers one measurement in dir/accel.json.
type cache struct{ dir string }

const (
	cacheFile    = "accel.json"
	maxCacheFile = 4 << 10
)

type record struct {
	Host        host        `json:"host"`
	Measurement measurement `json:"measurement"`
}

// read returns the measurement taken on this boot of the host. A file that is
// not exactly what write makes is as good as none.
func (c cache) read(h host) (measurement, bool) {
	if c.dir == "" || h.BootID == "" {
		return measurement{}, false
	}
	f, err := os.Open(filepath.Join(c.dir, cacheFile))
	if err != nil {
		return measurement{}, false
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxCacheFile+1))
	if err != nil || len(data) > maxCacheFile {
		return measurement{}, false
	}
	var r record
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		return measurement{}, false
	}
	if _, err := d.Token(); err != io.EOF {
		return measurement{}, false
	}
	m := r.Measurement
	if r.Host != h || m.Steps < 0 || m.Steps > loopSteps || m.Took <= 0 || m.Took > time.Minute {
		return measurement{}, false
	}
	return m, true
}

// write remembers m, whole or not at all. That it could not is not reported:
// the next choice then takes a moment longer.
func (c cache) write(h host, m measurement) {
	if c.dir == "" || h.BootID == "" {
		return
	}
	data, err := json.Marshal(record{h, m})
	if err != nil {
		return
	}
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return
	}
	f, err := os.CreateTemp(c.dir, cacheFile+".*")
	if err != nil {
		return
	}
	_, err = f.Write(append(data, '\n'))
	if closed := f.Close(); err == nil {
		err = closed
	}
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(c.dir, cacheFile))
	}
	if err != nil {
		os.Remove(f.Name())
	}
}
