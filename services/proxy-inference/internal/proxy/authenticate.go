package proxy

import (
	"crypto/rand"
	"encoding/base32"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/keys"
	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/openai"
)

// authenticate finds out who asks, and for a path that names an endpoint whether
// they may know it. It answers itself when it reports false.
func (c *call) authenticate() bool {
	full := presentedKey(c.r)
	if c.exact != "" {
		endpoint, known := c.h.Routes.Endpoint(c.exact)
		if known && !endpoint.RequireAuthorization {
			// A key of the endpoint's project is counted; any other text is what
			// clients send that must send something.
			if key, verdict := c.h.Keys.Check(full); verdict == keys.Good && key.ProjectID == endpoint.ProjectID {
				c.key = key
			}
			c.endpoint = endpoint
			return true
		}
		if !c.checkKey(full) {
			return false
		}
		if !known || endpoint.ProjectID != c.key.ProjectID {
			if _, since := c.h.Routes.Status(); since.IsZero() {
				c.refuse(notReceived)
			} else {
				c.refuse(&openai.Error{Status: http.StatusNotFound, Type: openai.TypeInvalid, Code: "model_not_found",
					Message: "the endpoint does not exist or you do not have access to it"})
			}
			return false
		}
		c.endpoint = endpoint
		return true
	}
	return c.checkKey(full)
}

// presentedKey is the key that the client sent, or "".
func presentedKey(r *http.Request) string {
	if scheme, key, ok := strings.Cut(r.Header.Get("Authorization"), " "); ok && strings.EqualFold(scheme, "bearer") {
		return strings.TrimSpace(key)
	}
	return strings.TrimSpace(r.Header.Get("X-Api-Key"))
}

func (c *call) checkKey(full string) bool {
	unauthorized := func(code, message string) bool {
		c.refuse(&openai.Error{Status: http.StatusUnauthorized, Type: openai.TypeInvalid, Code: code, Message: message})
		return false
	}
	if full == "" {
		return unauthorized("missing_api_key", "you did not provide an api key: send it as 'Authorization: Bearer cak_...' or 'X-API-Key: cak_...'")
	}
	key, verdict := c.h.Keys.CheckSoon(c.r.Context(), full)
	switch verdict {
	case keys.Good:
		c.key = key
		return true
	case keys.Malformed:
		return unauthorized("invalid_api_key", "incorrect api key provided: it was cut or changed, or it is no key of this platform")
	case keys.Revoked:
		return unauthorized("revoked_api_key", "this api key was revoked")
	case keys.Expired:
		return unauthorized("expired_api_key", "this api key has expired")
	case keys.NoTable:
		c.refuse(&openai.Error{Status: http.StatusServiceUnavailable, Type: openai.TypeServer, Code: "api_keys_not_received",
			Message: "this proxy has just started and does not know the api keys yet; try again shortly", RetryAfter: 2 * time.Second})
		return false
	default:
		return unauthorized("invalid_api_key", "incorrect api key provided")
	}
}

// requestID is the client's X-Request-Id when it is harmless, else a new one.
func requestID(r *http.Request, random io.Reader) string {
	id := r.Header.Get("X-Request-Id")
	if len(id) >= 1 && len(id) <= 128 && strings.Trim(id, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.") == "" {
		return id
	}
	return "req_" + randomText(random)
}

var base32Lower = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// randomText is 128 random bits.
func randomText(random io.Reader) string {
	var b [16]byte
	if _, err := io.ReadFull(random, b[:]); err != nil {
		rand.Read(b[:]) // never fails
	}
	return base32Lower.EncodeToString(b[:])
}

// printable keeps a client's word short and harmless in an answer.
func printable(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, s)
	return s[:min(len(s), 40)]
}
