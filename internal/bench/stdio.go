package bench

import (
	"context"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/machine"
	"github.com/warren-vm/warren/internal/vm"
)

// floorPort is the port of the floor's VM that is measured. The agent has its
// own beside it and finds it by its name.
const floorPort = "warren.floor"

// supervisorPeak is the phase that holds the supervisor's memory.
const supervisorPeak = "supervisor_peak_mib"

// stdio measures bytes through `cat` in the guest and back, against the same
// bytes through `cat` on a bare virtio-serial port.
func stdio() Benchmark {
	return Benchmark{
		Name:  "stdio",
		Title: "bytes through stdin and stdout of `cat`",
		Floor: "bare port",
		Unit:  MiBPerSecond,
		N:     3,
		Bars:  []Bar{{Of: "ratio", AtLeast: 0.5}, {Of: supervisorPeak, AtMost: 64}},
		open:  openStdio,
	}
}

type stdioPair struct {
	m    *machine.Machine
	bare *barePort
	data *payload
}

func openStdio(ctx context.Context, b *bed) (pair, error) {
	m, plain, err := b.machine(ctx)
	if err != nil {
		return nil, err
	}
	p := &stdioPair{m: m, data: newPayload(int64(b.o.StdioMiB) * mib)}
	plain.RootDisk, plain.DataDisk = b.image.Disk, b.image.DataBase
	p.bare, err = openBarePort(ctx, plain)
	if err != nil {
		_ = p.close()
		return nil, fmt.Errorf("the floor: %w", err)
	}
	return p, nil
}

// turn bounds one transfer: a MiB per second, and a minute to begin.
func (p *stdioPair) turn(ctx context.Context) (context.Context, context.CancelFunc) {
	return deadline(ctx, time.Minute+time.Duration(p.data.size/mib)*time.Second)
}

func (p *stdioPair) subject(ctx context.Context, count int) ([]sample, error) {
	status, err := p.m.Status(ctx)
	if err != nil {
		return nil, err
	}
	var out []sample
	for range count {
		rate, err := p.through(ctx)
		if err != nil {
			return nil, err
		}
		peak, err := peakMiB(status.SupervisorPID)
		if err != nil {
			return nil, err
		}
		out = append(out, sample{rate, map[string]float64{supervisorPeak: peak}})
	}
	return out, nil
}

// through sends the payload through one `cat`, from the client of a machine
// to the guest and back.
func (p *stdioPair) through(ctx context.Context) (float64, error) {
	ctx, cancel := p.turn(ctx)
	defer cancel()
	s := newSink(p.data)
	run, err := p.m.Exec(ctx, guestapi.ExecRequest{ID: "bench", Argv: []string{"cat"}, Stdin: true}, s, io.Discard)
	if err != nil {
		return 0, reason(ctx, err)
	}
	rate, err := throughput(ctx, s, run.Stdin(), run.Stdin().Close, func() error {
		status, err := run.Wait()
		if code := status.ExitCode(); err == nil && code != 0 {
			err = fmt.Errorf("cat ended with code %d", code)
		}
		return err
	})
	return rate, reason(ctx, err)
}

func (p *stdioPair) floor(ctx context.Context, count int) ([]float64, error) {
	var out []float64
	for range count {
		rate, err := p.plainly(ctx)
		if err != nil {
			return nil, err
		}
		out = append(out, rate)
	}
	return out, nil
}

// plainly sends the payload through the bare port.
func (p *stdioPair) plainly(ctx context.Context) (float64, error) {
	ctx, cancel := p.turn(ctx)
	defer cancel()
	// Whoever is stuck in the port lets go of it when ctx ends. It is not
	// used any more after that.
	stop := context.AfterFunc(ctx, func() { _ = p.bare.port.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	s := newSink(p.data)
	rate, err := throughput(ctx, s, p.bare.port, nil, func() error {
		_, err := io.CopyN(s, p.bare.port, p.data.size)
		return err
	})
	return rate, reason(ctx, err)
}

func (p *stdioPair) close() error {
	if p.bare != nil {
		p.bare.close()
	}
	return closeMachine(p.m)
}

// barePort is a virtio-serial port of a plain QEMU on whose guest end `cat`
// copies whatever comes back to where it came from. Supervisor, link and
// agent have no part in that: the agent has started the shell that opened the
// port, and is idle.
type barePort struct {
	vm    *plainVM
	guest *guestClient
	cat   io.Closer
	port  net.Conn
}

// copyBack opens the port of a name, says so, and becomes cat. A port can be
// open once only, so one descriptor serves both directions.
const copyBack = `for p in /sys/class/virtio-ports/*; do
	if [ "$(cat "$p/name")" = ` + floorPort + ` ]; then
		exec 3<>"/dev/${p##*/}" && echo open && exec cat <&3 >&3
	fi
done
echo "no port ` + floorPort + `" >&2
exit 1`

func openBarePort(ctx context.Context, p plain) (_ *barePort, err error) {
	setUp, cancel := deadline(ctx, bootDeadline)
	defer cancel()
	p.Ports = []string{vm.LinkPort, floorPort}
	b := &barePort{}
	if b.vm, err = p.start(ctx); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = reason(setUp, err)
			b.close()
		}
	}()
	// A VM that dies gives no answer: the wait for one ends with it.
	setUp, died := context.WithCancelCause(setUp)
	defer died(nil)
	go func() {
		select {
		case <-b.vm.exited:
			died(fmt.Errorf("plain QEMU ended: %w", b.vm.died()))
		case <-setUp.Done():
		}
	}()
	if _, err = b.vm.awaitInit(); err != nil {
		return nil, err
	}
	go b.vm.drain()
	if b.guest, err = dialGuest(setUp, b.vm.ports[0]); err != nil {
		return nil, err
	}
	if err = b.guest.prepare(setUp); err != nil {
		return nil, err
	}
	// Its conversation goes on, so ctx it is.
	if b.cat, err = b.guest.startProgram(ctx, "open\n", "/bin/sh", "-c", copyBack); err != nil {
		return nil, err
	}
	b.port = b.vm.ports[1]
	return b, nil
}

// close kills the VM.
func (b *barePort) close() {
	b.vm.stop()
	if b.cat != nil {
		b.cat.Close()
	}
	if b.guest != nil {
		b.guest.close()
	}
}
