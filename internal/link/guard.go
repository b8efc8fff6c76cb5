package link

import (
	"encoding/binary"
	"fmt"
	"sync"

	"github.com/warren-vm/warren/internal/guestapi"
)

// yamux's wire format, version 0. The numbers are fixed by its specification.
const (
	muxHeaderSize = 12
	muxWindow     = 256 << 10 // of every stream at its beginning

	muxData   = 0
	muxWinUpd = 1
	muxPing   = 2
	muxGoAway = 3

	flagSYN   = 1
	flagACK   = 2
	flagFIN   = 4
	flagRST   = 8
	flagsMask = 15
)

// muxHeader is the header of a yamux frame.
type muxHeader [muxHeaderSize]byte

func (h *muxHeader) version() byte  { return h[0] }
func (h *muxHeader) kind() byte     { return h[1] }
func (h *muxHeader) flags() uint16  { return binary.BigEndian.Uint16(h[2:]) }
func (h *muxHeader) id() uint32     { return binary.BigEndian.Uint32(h[4:]) }
func (h *muxHeader) length() uint32 { return binary.BigEndian.Uint32(h[8:]) }
func (h *muxHeader) has(flag uint16) bool {
	return h.flags()&flag != 0
}

// body is how many bytes follow the header.
func (h *muxHeader) body() uint32 {
	if h.kind() == muxData {
		return h.length()
	}
	return 0
}

const (
	// maxWindow is what each side widens a stream's window to as soon as it is
	// open. What is under way between two programs waits for several processes
	// in turn: 256 KiB let 29 MiB/s through `cat` and back, 1 MiB 40, 2 MiB no
	// more.
	maxWindow = 1 << 20
	// maxUntaken is how many streams the other side may open before this side
	// takes them with Accept.
	maxUntaken = 64
	// maxUnread bounds the bytes that have arrived for streams whose readers
	// do not read. It is what 16 streams with full windows hold.
	maxUnread = 16 * maxWindow
)

// guard stands between the port and yamux, sees every yamux header in both
// directions and keeps its own account of every stream. yamux trusts its
// peer in places where a guest cannot be trusted: it starts a goroutine for
// each ping, allocates for each SYN, adds up windows without a bound and goes
// on to buffer for a stream that this side has closed. The guard ends the
// session on the first three, drops the bytes in the fourth case, and lets
// yamux see no header of a body that has not arrived.
//
// The guest has one too. It needs no protection from its host, but the account
// also tells whether a stream ended or was cut off, which yamux does not.
type guard struct {
	odd   uint32        // parity of the stream ids this side opens
	slots chan struct{} // one for each stream of this side's making

	mu       sync.Mutex
	room     sync.Cond        // unread went down, or closed
	flows    map[uint32]*flow // open on either side
	fresh    map[uint32]*flow // not yet taken by Open or Accept; may be over
	last     [2]uint32        // highest stream id seen, by parity
	theirs   int              // flows of the other side's making
	untaken  int              // of fresh, those of the other side's making
	unread   int
	isClosed bool

	// What follows belongs to the reader.
	hdr  muxHeader
	have int    // bytes of hdr that have arrived
	out  []byte // part of hdr that has to be handed on
	body uint32 // bytes left of the body
	drop bool   // the body is not for yamux
}

// flow is the account of one stream. guard.mu protects it.
type flow struct {
	mine       bool
	acked      bool
	fin        bool // by the other side
	finSent    bool
	closed     bool // nobody here will read any more
	unread     int
	recvWindow int64 // what the other side may still send
	sendWindow int64 // what this side may still send
}

func newGuard(host bool) *guard {
	g := &guard{
		slots: make(chan struct{}, guestapi.MaxStreams),
		flows: make(map[uint32]*flow),
		fresh: make(map[uint32]*flow),
	}
	if host {
		g.odd = 1
	}
	g.room.L = &g.mu
	return g
}

func newFlow(mine bool) *flow {
	return &flow{mine: mine, recvWindow: muxWindow, sendWindow: muxWindow}
}

// pass moves bytes that came from the other side from src to dst, checking
// each header before its last byte is handed on. It returns how many bytes it
// wrote and took. An error wraps ErrProtocol.
func (g *guard) pass(dst, src []byte) (wrote, took int, err error) {
	for {
		if len(g.out) > 0 {
			n := copy(dst[wrote:], g.out)
			g.out = g.out[n:]
			wrote += n
			if len(g.out) > 0 {
				return wrote, took, nil
			}
		}
		if g.body > 0 {
			n := min(int(g.body), len(src)-took)
			if !g.drop {
				n = copy(dst[wrote:], src[took:took+n])
				wrote += n
			}
			took += n
			g.body -= uint32(n)
			if g.body > 0 {
				return wrote, took, nil
			}
		}
		n := copy(g.hdr[g.have:], src[took:])
		took += n
		g.have += n
		if g.have < muxHeaderSize {
			return wrote, took, nil
		}
		g.have = 0
		if err := g.received(len(src) - took); err != nil {
			return wrote, took, err
		}
	}
}

// received checks the header in g.hdr, behind which rest bytes of the frame
// on the port follow, and decides what is handed on.
func (g *guard) received(rest int) error {
	h := &g.hdr
	switch {
	case h.version() != 0:
		return broken("multiplexer version %d", h.version())
	case h.kind() == muxPing:
		return broken("a ping, which nobody sends here")
	case h.kind() == muxGoAway:
		return broken("it gave the session up with code %d", h.length())
	case h.kind() > muxGoAway:
		return broken("multiplexer frame of type %d", h.kind())
	case h.flags()&^flagsMask != 0:
		return broken("multiplexer flags %#x", h.flags())
	case h.id() == 0:
		return broken("a stream with number 0")
	case h.length() > maxWindow:
		return broken("length %d, more than a window of %d", h.length(), maxWindow)
	case g.odd == 1 && int64(h.body()) > int64(rest):
		// yamux holds a stream's lock while it reads a body. A guest that
		// announced one and kept it back would hold up Read beyond its
		// deadline, and Close. Ours sends header and body in one frame.
		return broken("%d bytes on stream %d, of which %d came with their header", h.body(), h.id(), rest)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	f, err := g.find(h)
	if err != nil {
		return err
	}
	g.body = h.body()
	if f == nil {
		// A stream that is over. The other side may not know yet.
		g.drop = true
		return nil
	}
	return g.account(f, h)
}

// find returns the flow that h belongs to, opening it on a SYN, or nil when
// that stream is over.
func (g *guard) find(h *muxHeader) (*flow, error) {
	id := h.id()
	f := g.flows[id]
	if !h.has(flagSYN) {
		if f == nil && id > g.last[id&1] {
			return nil, broken("stream %d, which nobody opened", id)
		}
		return f, nil
	}
	switch {
	case id&1 == g.odd:
		return nil, broken("it opened stream %d, a number of this side", id)
	case f != nil || g.fresh[id] != nil:
		return nil, broken("it opened stream %d twice", id)
	case g.untaken >= maxUntaken:
		return nil, broken("it opened more than %d streams that nobody took", maxUntaken)
	case g.theirs >= guestapi.MaxStreams:
		return nil, broken("it opened more than %d streams", guestapi.MaxStreams)
	}
	f = newFlow(false)
	g.flows[id], g.fresh[id] = f, f
	g.last[id&1] = max(g.last[id&1], id)
	g.theirs++
	g.untaken++
	return f, nil
}

// account books h, which belongs to f.
func (g *guard) account(f *flow, h *muxHeader) error {
	n := int64(h.length())
	if h.has(flagACK) {
		if !f.mine || f.acked {
			return broken("it acknowledged stream %d, which was not asked for", h.id())
		}
		f.acked = true
	}
	ended := f.fin
	if h.has(flagFIN) {
		if f.fin {
			return broken("it ended stream %d twice", h.id())
		}
		f.fin = true
	}
	g.out, g.drop = h[:], false
	if h.kind() == muxWinUpd {
		if f.sendWindow += n; f.sendWindow > maxWindow {
			return broken("it widened the window of stream %d over %d", h.id(), maxWindow)
		}
	} else {
		if f.recvWindow -= n; f.recvWindow < 0 {
			return broken("it sent more on stream %d than its window", h.id())
		}
		if f.closed || ended {
			// Flags count, the bytes have no reader. A write that races
			// with its own Close may send some after the end.
			g.drop = true
			binary.BigEndian.PutUint32(h[8:], 0)
		} else {
			f.unread += int(n)
			g.unread += int(n)
		}
	}
	if h.has(flagRST) || f.fin && f.finSent {
		g.remove(h.id(), f)
	}
	return nil
}

// sent books a header of this side.
func (g *guard) sent(h *muxHeader) {
	if h.kind() > muxWinUpd {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	id := h.id()
	if h.has(flagSYN) {
		f := newFlow(true)
		g.flows[id], g.fresh[id] = f, f
		g.last[id&1] = max(g.last[id&1], id)
	}
	f := g.flows[id]
	if f == nil {
		return
	}
	if h.kind() == muxData {
		f.sendWindow -= int64(h.length())
	} else {
		f.recvWindow += int64(h.length())
	}
	f.finSent = f.finSent || h.has(flagFIN)
	if h.has(flagRST) || f.fin && f.finSent {
		g.remove(id, f)
	}
}

// remove forgets a stream that is over on both sides. Bytes that wait for
// its reader still count.
func (g *guard) remove(id uint32, f *flow) {
	delete(g.flows, id)
	if f.mine {
		<-g.slots // Open put one in before the SYN
	} else {
		g.theirs--
	}
}

// take returns the account of a stream that yamux has just handed out; the
// other side may have ended or reset it by then. It returns nil for a stream
// that never came to be, which yamux hands out when its end crosses OpenStream.
func (g *guard) take(id uint32) *flow {
	g.mu.Lock()
	defer g.mu.Unlock()
	f := g.fresh[id]
	delete(g.fresh, id)
	if f != nil && !f.mine {
		g.untaken--
	}
	return f
}

// read says that n bytes of f have been read.
func (g *guard) read(f *flow, n int) {
	g.mu.Lock()
	// Close may have written the rest off already.
	n = min(n, f.unread)
	f.unread -= n
	g.unread -= n
	g.mu.Unlock()
	g.room.Signal()
}

// ended reports whether the other side ended f in order.
func (g *guard) ended(f *flow) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return f.fin
}

// forget says that nobody will read from f any more.
func (g *guard) forget(f *flow) {
	g.mu.Lock()
	f.closed = true
	g.unread -= f.unread
	f.unread = 0
	g.mu.Unlock()
	g.room.Signal()
}

// wait blocks while too much is unread. Only the streams' readers can change
// that, so a session whose streams nobody reads stands still, with a bound on
// its memory.
func (g *guard) wait() {
	g.mu.Lock()
	for g.unread >= maxUnread && !g.isClosed {
		g.room.Wait()
	}
	g.mu.Unlock()
}

func (g *guard) close() {
	g.mu.Lock()
	g.isClosed = true
	g.mu.Unlock()
	g.room.Broadcast()
}

func broken(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrProtocol, fmt.Errorf(format, args...))
}
