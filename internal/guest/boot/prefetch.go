package boot

import (
	"io"
	"os"
	"path/filepath"
)

// hot are the files that the first program of nearly every VM needs, relative
// to the root disk.
var hot = []string{
	"usr/lib/*-linux-gnu*/ld-linux-*.so.*",
	"usr/lib/*-linux-gnu*/libc.so.6",
	"usr/bin/dash",
	"usr/bin/env",
}

// prefetch reads hot into the page cache while the drivers are loaded: the
// host's answers come meanwhile. It is a favour: what cannot be read is left
// to its first reader.
func prefetch() {
	for _, pattern := range hot {
		paths, _ := filepath.Glob(filepath.Join(rootDisk, pattern)) // the patterns are well formed
		for _, path := range paths {
			if f, err := os.Open(path); err == nil {
				_, _ = io.Copy(io.Discard, f)
				f.Close()
			}
		}
	}
}
