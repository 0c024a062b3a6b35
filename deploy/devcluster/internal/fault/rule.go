package fault

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Rule says which requests to the API server meet a fault. The zero value is every request for ever.
type Rule struct {
	Verb     string        // get, list, watch, create, update, patch, delete; empty for any
	Resource string        // plural, as pods or pods/eviction; empty for any
	Count    int           // how many requests meet it; 0 for no end
	Every    int           // only each n-th request that matches; 0 and 1 for each
	For      time.Duration // how long from when the proxy reads the rule; 0 for no end
	Delay    time.Duration // api-slow, api-cut-watch
	Code     int           // api-answer
}

// ParseRules reads the value of an API switch: rules split by semicolons, each of key=value words split by spaces:
// verb= resource= count= every= for= delay= code=. The rule * is every request.
func ParseRules(value string) ([]Rule, error) {
	var out []Rule
	for _, part := range strings.Split(value, ";") {
		words := strings.Fields(part)
		if len(words) == 0 {
			return nil, fmt.Errorf("an API rule is empty: want words like verb=create resource=pods count=3, or *")
		}
		var r Rule
		for _, w := range words {
			if w == "*" {
				continue
			}
			key, v, ok := strings.Cut(w, "=")
			if !ok || v == "" {
				return nil, fmt.Errorf("want key=value in an API rule, got %q", w)
			}
			var err error
			switch key {
			case "verb":
				r.Verb = v
			case "resource":
				r.Resource = v
			case "count":
				r.Count, err = number(v, 1, 1_000_000)
			case "every":
				r.Every, err = number(v, 1, 1_000_000)
			case "code":
				r.Code, err = number(v, 400, 599)
			case "for":
				r.For, err = wait(v)
			case "delay":
				r.Delay, err = wait(v)
			default:
				err = fmt.Errorf("known are verb, resource, count, every, for, delay, code")
			}
			if err != nil {
				return nil, fmt.Errorf("%s in an API rule: %w", w, err)
			}
		}
		out = append(out, r)
	}
	return out, nil
}

func number(s string, low, high int) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < low || n > high {
		return 0, fmt.Errorf("want a whole number from %d to %d", low, high)
	}
	return n, nil
}

func wait(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err != nil || d <= 0 || d > time.Hour {
		return 0, fmt.Errorf("want a duration like 500ms, at most 1h")
	}
	return d, nil
}
