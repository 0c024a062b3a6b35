package proxy

import (
	"bytes"
	"errors"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/openai"
)

// budget is the memory that bodies may take together.
type budget struct {
	maximum int64
	mu      sync.Mutex
	used    int64
}

func (b *budget) take(n int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.used+n > b.maximum {
		return false
	}
	b.used += n
	return true
}

func (b *budget) give(n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used -= n
}

// lingerBytes and lingerTime are how much of a refused body is thrown away
// before the connection is cut, so that the client reads the answer and not a
// reset.
const (
	lingerBytes = 256 << 20
	lingerTime  = 10 * time.Second
)

// readBody reads the whole body, since a retry needs it, and finds its model. It
// answers itself when it cannot. The returned release gives the memory back.
func (c *call) readBody() (release func()) {
	h := c.h
	var held int64
	release = func() { h.memory.give(held) }
	if c.r.ContentLength > h.Limits.Body {
		c.refuseBody(c.tooLarge())
		return release
	}
	grow := func(n int) bool {
		if !h.memory.take(int64(n)) {
			return false
		}
		held += int64(n)
		return true
	}
	noMemory := &openai.Error{Status: http.StatusServiceUnavailable, Type: openai.TypeServer, Code: "proxy_overloaded",
		Message: "this proxy has too many request bodies in memory; try again shortly", RetryAfter: time.Second}

	size := 4 << 10
	if n := c.r.ContentLength; n > 0 {
		size = int(min(n+1, 256<<10)) // one more than announced, to see the end
	}
	if !grow(size) {
		c.refuseBody(noMemory)
		return release
	}
	body := make([]byte, 0, size)
	for {
		if len(body) == cap(body) {
			next := min(2*cap(body), int(h.Limits.Body)+1)
			if n := c.r.ContentLength; n > 0 {
				next = min(next, int(n)+1)
			}
			next = max(next, cap(body)+1)
			if !grow(next - cap(body)) {
				c.refuseBody(noMemory)
				return release
			}
			bigger := make([]byte, len(body), next)
			copy(bigger, body)
			body = bigger
		}
		c.rc.SetReadDeadline(time.Now().Add(h.Timeouts.Upload))
		n, err := c.r.Body.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		if int64(len(body)) > h.Limits.Body {
			c.refuseBody(c.tooLarge())
			return release
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			c.incompleteBody(err)
			return release
		}
	}
	c.rc.SetReadDeadline(time.Time{}) // from now on the server watches for the client's end
	c.body = body
	c.inspect()
	return release
}

func (c *call) tooLarge() *openai.Error {
	return &openai.Error{Status: http.StatusRequestEntityTooLarge, Type: openai.TypeInvalid, Code: "request_too_large",
		Message: "the request body is larger than " + strconv.FormatInt(c.h.Limits.Body, 10) + " bytes"}
}

// refuseBody answers while the body is still coming.
func (c *call) refuseBody(e *openai.Error) {
	c.rc.EnableFullDuplex() // or writing would first read the rest
	c.w.Header().Set("Connection", "close")
	c.refuse(e)
	c.rc.Flush()
	c.rc.SetReadDeadline(time.Now().Add(lingerTime))
	buffer := c.h.buffers.Get().(*[]byte)
	defer c.h.buffers.Put(buffer)
	for left := int64(lingerBytes); left > 0; {
		n, err := c.r.Body.Read(*buffer)
		left -= int64(n)
		if err != nil {
			return
		}
	}
}

func (c *call) incompleteBody(err error) {
	c.w.Header().Set("Connection", "close")
	var timeout interface{ Timeout() bool }
	if errors.As(err, &timeout) && timeout.Timeout() {
		c.refuse(&openai.Error{Status: http.StatusRequestTimeout, Type: openai.TypeInvalid, Code: "request_body_timeout", NoRetry: true,
			Message: "the request body stopped coming for " + c.h.Timeouts.Upload.String()})
		return
	}
	c.refuse(openai.Invalid("incomplete_body", "", "the request body ended early or is badly framed"))
}

// inspect finds the fields that decide where a request goes.
func (c *call) inspect() {
	if c.face.multipart {
		model, err := formModel(c.r.Header.Get("Content-Type"), c.body)
		if err != nil {
			c.refuse(err)
			return
		}
		c.model, c.pieces = model, [][]byte{c.body}
		return
	}
	request, err := openai.Scan(c.body)
	if err != nil {
		c.refuse(err)
		return
	}
	c.request, c.model, c.pieces = request, request.Model, [][]byte{c.body}
	if c.face.stream {
		c.pieces, c.hide = request.WithUsage(c.body)
	}
}

// formModel finds the field "model" of a form. The form itself passes unchanged.
func formModel(contentType string, body []byte) (string, *openai.Error) {
	media, parameters, err := mime.ParseMediaType(contentType)
	if err != nil || media != "multipart/form-data" || parameters["boundary"] == "" {
		return "", openai.Invalid("invalid_content_type", "", "the request must be multipart/form-data with a boundary")
	}
	form := multipart.NewReader(bytes.NewReader(body), parameters["boundary"])
	model := ""
	for range 100 {
		part, err := form.NextRawPart()
		if err == io.EOF {
			return model, nil
		}
		if err != nil {
			return "", openai.Invalid("invalid_form", "", "the request body is not a whole multipart form")
		}
		if part.FormName() == "model" && part.FileName() == "" {
			text, err := io.ReadAll(io.LimitReader(part, 1<<10))
			if err != nil {
				return "", openai.Invalid("invalid_form", "model", "the field 'model' is not whole")
			}
			model = string(text)
		}
	}
	return "", openai.Invalid("invalid_form", "", "the form has more than 100 fields")
}

// pieceReader reads the pieces of a body one after the other.
type pieceReader struct {
	pieces [][]byte
}

func newPieceReader(pieces [][]byte) *pieceReader {
	return &pieceReader{pieces: append([][]byte(nil), pieces...)}
}

func (r *pieceReader) Read(p []byte) (int, error) {
	for len(r.pieces) > 0 && len(r.pieces[0]) == 0 {
		r.pieces = r.pieces[1:]
	}
	if len(r.pieces) == 0 {
		return 0, io.EOF
	}
	n := copy(p, r.pieces[0])
	r.pieces[0] = r.pieces[0][n:]
	return n, nil
}

func (r *pieceReader) Close() error { return nil }
