package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/supervisor/control"
)

// ReadFile reads a file of the guest from offset on, limit bytes of it or, if
// that is negative, all. The caller closes the reader; only after io.EOF was
// the file read whole.
func (c *Client) ReadFile(ctx context.Context, path string, offset, limit int64) (io.ReadCloser, error) {
	query := url.Values{"path": {path}}
	if offset != 0 {
		query.Set("offset", strconv.FormatInt(offset, 10))
	}
	if limit >= 0 {
		query.Set("limit", strconv.FormatInt(limit, 10))
	}
	return c.download(ctx, guestapi.FilePath, query)
}

// WriteFile makes a file of the guest hold what body gives, or leaves it as
// it was. It belongs to user, or to root if that is empty.
func (c *Client) WriteFile(ctx context.Context, path string, mode fs.FileMode, user string, body io.Reader) error {
	query := url.Values{"path": {path}, "mode": {strconv.FormatUint(uint64(unixMode(mode)), 8)}}
	if user != "" {
		query.Set("user", user)
	}
	return c.upload(ctx, guestapi.FilePath, query, body)
}

// TarGet packs a tree of the guest. The caller closes the reader; only after
// io.EOF was the tree read whole.
func (c *Client) TarGet(ctx context.Context, path string) (io.ReadCloser, error) {
	return c.download(ctx, guestapi.TarPath, url.Values{"path": {path}})
}

// TarPut unpacks a tar archive below path in the guest. Everything belongs to
// user, or to whom the archive says if that is empty.
func (c *Client) TarPut(ctx context.Context, path, user string, body io.Reader) error {
	query := url.Values{"path": {path}}
	if user != "" {
		query.Set("user", user)
	}
	return c.upload(ctx, guestapi.TarPath, query, body)
}

func (c *Client) download(ctx context.Context, path string, query url.Values) (io.ReadCloser, error) {
	resp, err := c.send(ctx, http.MethodGet, control.GuestPrefix+path+"?"+query.Encode(), nil)
	if err != nil {
		return nil, err
	}
	return &download{c: c, ctx: ctx, resp: resp}, nil
}

// download is a body whose trailer says whether it is whole.
type download struct {
	c    *Client
	ctx  context.Context
	resp *http.Response
	err  error // of the trailer or the stream; stays
}

func (d *download) Read(p []byte) (int, error) {
	if d.err != nil {
		return 0, d.err
	}
	n, err := d.resp.Body.Read(p)
	switch {
	case err == nil:
	case err == io.EOF:
		d.err = io.EOF
		if line := d.resp.Trailer.Get(guestapi.ErrorTrailer); line != "" {
			d.err = fromFault(control.ReadFault(strings.NewReader(line)))
		}
	default:
		d.err = d.c.lost(d.ctx, err)
	}
	return n, d.err
}

func (d *download) Close() error { return d.resp.Body.Close() }

func (c *Client) upload(ctx context.Context, path string, query url.Values, body io.Reader) error {
	src := &source{r: body}
	// The transport closes a body that is a Closer; this one stays the
	// caller's.
	resp, err := c.send(ctx, http.MethodPut, control.GuestPrefix+path+"?"+query.Encode(), src)
	if err != nil {
		if src.err != nil && !errors.Is(err, ErrGone) {
			return fmt.Errorf("read what is to be sent: %w", src.err)
		}
		return err
	}
	return resp.Body.Close()
}

// unixMode is a file mode as the guest writes it.
func unixMode(mode fs.FileMode) uint32 {
	m := uint32(mode.Perm())
	for _, bit := range []struct {
		of   fs.FileMode
		unix uint32
	}{{fs.ModeSetuid, 0o4000}, {fs.ModeSetgid, 0o2000}, {fs.ModeSticky, 0o1000}} {
		if mode&bit.of != 0 {
			m |= bit.unix
		}
	}
	return m
}
