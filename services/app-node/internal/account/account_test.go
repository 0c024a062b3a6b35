package account

import (
	"context"
	"crypto/rand"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

func TestAPasswordMatchesItsOwnHashOnly(t *testing.T) {
	t.Parallel()
	h, err := NewHasher(rand.Reader, 2)
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	first, err := h.Hash(ctx, "pässwörd 🔑 one")
	if err != nil {
		t.Fatal(err)
	}
	if again, _ := h.Hash(ctx, "pässwörd 🔑 one"); again == first {
		t.Error("two hashes of one password are equal: no salt")
	}
	for password, want := range map[string]bool{"pässwörd 🔑 one": true, "pässwörd 🔑 two": false, "": false} {
		if got, err := h.Matches(ctx, first, password); err != nil || got != want {
			t.Errorf("%q matches: %v, %v", password, got, err)
		}
	}
	// No user: even the password behind the dummy does not open the door.
	for _, password := range []string{"a password that nobody has", "x"} {
		if got, err := h.Matches(ctx, "", password); err != nil || got {
			t.Errorf("nobody's password matches: %v, %v", got, err)
		}
	}
	for _, damaged := range []string{"x", "$argon2id$v=19$m=1,t=1,p=1$!$!", "$argon2i$v=19$m=1,t=1,p=1$YQ$YQ", strings.Replace(first, "v=19", "v=18", 1)} {
		if got, err := h.Matches(ctx, damaged, "x"); err == nil || got {
			t.Errorf("a damaged hash matches: %v, %v", got, err)
		}
	}
}

func TestAPasswordThatCannotBeTypedAgainIsRefusedInWords(t *testing.T) {
	t.Parallel()
	for password, want := range map[string]string{
		"a good password": "", "pässwörd 🔑 one": "", "short": "at least", strings.Repeat("\x00", 16): "control characters",
		"line one\nline two": "control characters", strings.Repeat(" ", 16): "blanks alone", "user@example.com": "the email", "not \xff text at all": "UTF-8",
	} {
		err := CheckPolicy(password, "user@example.com")
		if want == "" && err != nil || want != "" && (fault.KindOf(err) != fault.Invalid || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: %v, want %q", password, err, want)
		}
	}
}

func TestHashingWaitsForASlotAsLongAsTheCallerDoes(t *testing.T) {
	t.Parallel()
	h, err := NewHasher(rand.Reader, 1)
	if err != nil {
		t.Fatal(err)
	}
	h.slots <- struct{}{}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := h.Hash(ctx, "anything at all"); !fault.Is(err, fault.Unavailable) {
		t.Errorf("a full hasher: %v", err)
	}
}

func TestTheLimiterCountsParallelTriesAndForgets(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	l := NewLimiter(10, time.Minute, func() time.Time { return now })
	var mu sync.Mutex
	var passed int
	var group sync.WaitGroup
	for range 100 {
		group.Go(func() {
			if l.Take("k") == 0 {
				mu.Lock()
				passed++
				mu.Unlock()
			}
		})
	}
	group.Wait()
	if passed != 10 {
		t.Errorf("%d of 100 tries passed", passed)
	}
	now = now.Add(61 * time.Second)
	if l.Take("k") == 0 {
		t.Error("the turn of a window lets a guesser go on at once")
	}
	now = now.Add(60 * time.Second)
	if l.Take("k") != 0 {
		t.Error("it does not forget")
	}
	l.Forgive("k")
	now = now.Add(-time.Hour)
	if l.Take("k") != 0 {
		t.Error("a clock that steps back locks people out")
	}
}

func TestAFloodOfKeysDoesNotGrowTheLimiterOrFreeAGuesser(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	l := NewLimiter(2, time.Minute, func() time.Time { return now })
	l.Take("guesser")
	l.Take("guesser")
	for i := range 3 * l.most {
		l.Take(fmt.Sprint(i))
	}
	if len(l.current) > l.most {
		t.Errorf("it holds %d keys", len(l.current))
	}
	if l.Take("guesser") == 0 {
		t.Error("the flood freed the guesser")
	}
}

func TestEmailsAndNames(t *testing.T) {
	t.Parallel()
	for email, want := range map[string]bool{
		"a@example.org": true, " a@example.org ": true, "a.b+c@sub.example.org": true,
		"ü@example.org": false, "\uff41dmin@example.org": false, "a\u202eb@example.org": false, "a\x00@example.org": false,
		"": false, "a": false, "@": false, "a@": false, "a b@example.org": false, "a@example.org\n": true, "a@exa\nmple.org": false,
		"A <a@example.org>": false, strings.Repeat("a", 250) + "@example.org": false, "a@example.org, b@example.org": false,
	} {
		if got, err := CheckEmail(email); (err == nil) != want || err == nil && got != strings.TrimSpace(email) {
			t.Errorf("%q: %q, %v", email, got, err)
		}
	}
	for name, want := range map[string]bool{
		"a": true, "模型-1": true, "👩‍🚀": true, strings.Repeat("é", 63): true,
		"": false, " ": false, " a": false, strings.Repeat("é", 64): false, "a\tb": false, "a\u2028b": false, "a\u202eb": false, "a\x00": false, "\xff": false,
	} {
		if err := CheckName("name", name); (err == nil) != want {
			t.Errorf("%q: %v", name, err)
		}
	}
}
