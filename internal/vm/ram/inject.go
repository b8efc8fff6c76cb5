package ram

import (
	"bytes"
	"fmt"
)

// Inject writes the pages of d into the RAM of a VM that does not run. To
// restore a snapshot, inject its differences oldest first. After an error the
// RAM is neither the one nor the other: end the process.
func (p *Process) Inject(d *Difference) error {
	err := p.inject(d)
	if err == nil {
		err = p.alive()
	}
	if err != nil {
		return fmt.Errorf("inject: %w", err)
	}
	return nil
}

func (p *Process) inject(d *Difference) error {
	if d.ram != p.pages {
		return fmt.Errorf("%s is for a RAM of %d pages, the process has %d", d.file.Name(), d.ram, p.pages)
	}
	block := takeBuffer()
	defer block.giveBack()
	var at uint64
	for runs := range blocks(d.runs(data)) {
		n := countPages(runs)
		buf := block[:n*PageSize]
		if err := d.readAt(buf, at); err != nil {
			return err
		}
		if err := p.write(runs, buf); err != nil {
			return err
		}
		at += n
	}
	for runs := range blocks(d.runs(zero)) {
		if err := p.clear(runs, block[:]); err != nil {
			return err
		}
	}
	return nil
}

// clear makes the pages of runs zero. Those that are zero already are left
// alone: a page that is written to takes memory, one that is a hole of the
// flat file does not.
func (p *Process) clear(runs []Run, buf []byte) error {
	if err := p.read(runs, buf); err != nil {
		return err
	}
	for _, r := range runs {
		for page := r.First; page < r.First+r.Count; page++ {
			if !bytes.Equal(buf[:PageSize], zeros[:]) {
				if err := p.write([]Run{{page, 1}}, zeros[:]); err != nil {
					return err
				}
			}
			buf = buf[PageSize:]
		}
	}
	return nil
}
