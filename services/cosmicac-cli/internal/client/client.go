// Package client speaks app-node's HTTP API. It keeps nothing and does not
// retry: a command says what failed and the user decides.
package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// maximumAnswerBytes bounds what is read of one answer.
const maximumAnswerBytes = 64 << 20

// Client calls one control plane under one login.
type Client struct {
	base  *url.URL
	token string
	http  *http.Client
}

// New makes a client of the control plane at base, a http or https URL.
func New(base, token string) (*Client, error) {
	if base == "" {
		return nil, fault.New(fault.Unauthenticated, "not logged in: run cosmicac login URL --email you@example.org")
	}
	u, err := url.Parse(base)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
		return nil, fault.New(fault.Invalid, "control plane %q is not a URL like https://cosmicac.example", base).
			With(fault.Detail{Field: "url", Rule: "http or https URL"})
	}
	return &Client{base: u, token: token, http: &http.Client{Transport: &http.Transport{
		Proxy: http.ProxyFromEnvironment, ResponseHeaderTimeout: 2 * time.Minute, ForceAttemptHTTP2: true,
	}}}, nil
}

// problem is RFC 9457 with our kind.
type problem struct {
	Title  string `json:"title"`
	Detail string `json:"detail"`
	Kind   string `json:"kind"`
	Errors []struct {
		Location string `json:"location"`
		Message  string `json:"message"`
	} `json:"errors"`
}

// Call does one request: in is sent as JSON when not nil, the answer decoded
// into out when not nil. headers may be nil. Errors are faults with the
// server's kind and details.
func (c *Client) Call(ctx context.Context, method, path string, query url.Values, headers http.Header, in, out any) error {
	res, err := c.send(ctx, method, path, query, headers, in)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, maximumAnswerBytes))
	if err != nil {
		return fault.Wrap(fault.Unreachable, err, "read the answer of %s %s", method, path)
	}
	if out == nil || len(bytes.TrimSpace(body)) == 0 {
		return nil
	}
	if err := json.Unmarshal(body, out); err != nil {
		return fault.Wrap(fault.Internal, err, "%s %s answered something that is not the expected JSON", method, path)
	}
	return nil
}

func (c *Client) send(ctx context.Context, method, path string, query url.Values, headers http.Header, in any) (*http.Response, error) {
	u := *c.base
	u.Path = strings.TrimSuffix(u.Path, "/") + path
	u.RawQuery = query.Encode()
	var body io.Reader
	if in != nil {
		raw, err := json.Marshal(in)
		if err != nil {
			return nil, err
		}
		body = bytes.NewReader(raw)
	}
	req, err := http.NewRequestWithContext(ctx, method, u.String(), body)
	if err != nil {
		return nil, fault.Wrap(fault.Invalid, err, "%s %s", method, path)
	}
	for k, v := range headers {
		req.Header[k] = v
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	res, err := c.http.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, fault.Wrap(fault.Unreachable, err, "control plane %s does not answer; check the URL and that Caddy and app-node run", c.base.Redacted())
	}
	if res.StatusCode < 300 {
		return res, nil
	}
	defer res.Body.Close()
	return nil, readProblem(res)
}

func readProblem(res *http.Response) error {
	raw, _ := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	var p problem
	if json.Unmarshal(raw, &p) != nil || (p.Kind == "" && p.Detail == "") {
		return fault.New(kindOfStatus(res.StatusCode), "the control plane answered %s", res.Status)
	}
	kind := fault.Kind(p.Kind)
	if p.Kind == "" {
		kind = kindOfStatus(res.StatusCode)
	}
	text := p.Detail
	if text == "" {
		text = strings.ToLower(p.Title)
	}
	e := fault.New(kind, "%s", text)
	for _, d := range p.Errors {
		e = e.With(fault.Detail{Field: strings.TrimPrefix(d.Location, "body."), Rule: d.Message})
	}
	return e
}

func kindOfStatus(status int) fault.Kind {
	for _, k := range fault.Kinds() {
		if k.HTTP() == status {
			return k
		}
	}
	if status >= 500 {
		return fault.Unavailable
	}
	return fault.Invalid
}

// Event is one server-sent event.
type Event struct {
	Name string
	Data []byte
}

// Events reads a server-sent event stream until each returns false, the stream
// ends (io.ErrUnexpectedEOF) or ctx is done. Events come in the server's order.
func (c *Client) Events(ctx context.Context, path string, each func(Event) bool) error {
	res, err := c.send(ctx, http.MethodGet, path, nil, http.Header{"Accept": {"text/event-stream"}}, nil)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	err = ReadEvents(res.Body, each)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// ReadEvents reads server-sent events from r; see Events.
func ReadEvents(r io.Reader, each func(Event) bool) error {
	scanner := bufio.NewScanner(r)
	scanner.Buffer(make([]byte, 64<<10), 16<<20)
	var e Event
	for scanner.Scan() {
		line := scanner.Bytes()
		switch {
		case len(line) == 0:
			if e.Data != nil || e.Name != "" {
				if !each(e) {
					return nil
				}
			}
			e = Event{}
		case bytes.HasPrefix(line, []byte("event:")):
			e.Name = strings.TrimSpace(string(line[6:]))
		case bytes.HasPrefix(line, []byte("data:")):
			if e.Data != nil {
				e.Data = append(e.Data, '\n')
			}
			e.Data = append(e.Data, bytes.TrimPrefix(line[5:], []byte(" "))...)
		}
	}
	if err := scanner.Err(); err != nil && !errors.Is(err, context.Canceled) {
		return fault.Wrap(fault.Unreachable, err, "the event stream broke")
	}
	return io.ErrUnexpectedEOF
}
