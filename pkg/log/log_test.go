package log

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestLinesReachStderrFileAndRing(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "x.log")
	var stderr bytes.Buffer
	l, err := Open("wrk-ork", Config{File: path, Format: "json"}, &stderr, NewRing(0))
	if err != nil {
		t.Fatal(err)
	}
	l.Logger().Named("mesh").Info("hello", "peer", "p1")
	l.Logger().Debug("hidden")
	data, _ := os.ReadFile(path)
	lines := l.Ring().After("", 0, 10)
	if len(lines) != 1 || string(lines[0].GetText())+"\n" != stderr.String() || stderr.String() != string(data) || !strings.Contains(stderr.String(), `"wrk-ork.mesh"`) {
		t.Errorf("%q, %q, %v", stderr.String(), data, lines)
	}
	// Another program rotates the file and sends SIGHUP.
	if err := os.Rename(path, path+".moved"); err != nil {
		t.Fatal(err)
	}
	if err := l.Reopen(); err != nil {
		t.Fatal(err)
	}
	l.Logger().Info("after")
	if data, _ := os.ReadFile(path); !strings.Contains(string(data), "after") || l.Failure() != nil {
		t.Errorf("%q", data)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

func TestTheFileIsRotatedBySizeAndOldOnesGo(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "x[1].log")
	now := time.Now()
	f, err := openFile(path, 100, 3, time.Hour, func() time.Time { return now })
	if err != nil {
		t.Fatal(err)
	}
	record := []byte(strings.Repeat("x", 39) + "\n")
	for range 20 {
		if err := f.write(record); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]bool{"": true, ".1": true, ".3": true, ".4": false} {
		info, err := os.Stat(path + name)
		if (err == nil) != want || want && (info.Size() > 100 || info.Size()%40 != 0) {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
	if err := os.WriteFile(path+".bak", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	now = now.Add(2 * time.Hour)
	f.expire()
	left, _ := os.ReadDir(filepath.Dir(path))
	if len(left) != 2 {
		t.Errorf("%v", left)
	}
	_ = f.close()
	if _, err := openFile(filepath.Join(path, "no"), 1, 1, 1, time.Now); err == nil {
		t.Error("opened a file below a file")
	}
}

func TestAReaderFollowsTheRingAndIsToldOfGaps(t *testing.T) {
	t.Parallel()
	r := NewRing(10)
	add := func(n int) {
		for range n {
			r.Add("daemon", time.Now(), fmt.Appendf(nil, "%d\n", r.next))
		}
	}
	text := func(position string, tail, most int) string {
		var s []string
		for _, l := range r.After(position, tail, most) {
			w := string(l.GetText())
			if l.GetGap() {
				w = "!" + w
			}
			s = append(s, w)
		}
		return strings.Join(s, " ")
	}
	if text("", 0, 9) != "" || text("elsewhere-0000000000000001", 0, 9) != "" {
		t.Error("an empty ring has lines")
	}
	add(3)
	third := r.After("", 1, 9)[0].GetPosition()
	for _, c := range []struct{ got, want string }{
		{text("", 0, 9), "1 2 3"}, {text("", 2, 9), "2 3"}, {text("", 0, 1), "1"}, {text(third, 0, 9), ""},
	} {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
	added, cancel := r.Subscribe()
	defer cancel()
	add(2)
	<-added
	if got := text(third, 0, 9); got != "4 5" {
		t.Errorf("got %q", got)
	}
	add(40)
	for _, position := range []string{third, "elsewhere-0000000000000003", "x", r.instance + "-00000000ffffffff"} {
		if got := text(position, 0, 3); got != "!36 37 38" {
			t.Errorf("after %s: %q", position, got)
		}
	}
	r.Add("console", time.Now(), bytes.Repeat([]byte("x"), 1<<20))
	if l := r.After("", 1, 1)[0]; len(l.GetText()) != MaxLineBytes || l.GetSource() != "console" {
		t.Errorf("%d bytes", len(l.GetText()))
	}
	big := NewRing(0)
	for range 2000 {
		big.Add("engine", time.Now(), make([]byte, MaxLineBytes))
	}
	if n := len(big.After("", 0, 9999)); n != maxRingBytes/MaxLineBytes {
		t.Errorf("%d lines of %d bytes are kept", n, MaxLineBytes)
	}
}

func TestConfigFaultsNameTheKey(t *testing.T) {
	t.Parallel()
	c := Config{Level: "loud", Format: "xml", MaxFiles: -1}
	c.Fill()
	var keys []string
	for _, d := range c.Validate() {
		keys = append(keys, d.Field)
	}
	if strings.Join(keys, " ") != "level format max_files" {
		t.Errorf("%v", keys)
	}
}
