package daemon

import (
	"bytes"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
)

const asHeap = "DAEMON_TEST_ALLOCATES"

var kept []byte

// allocateAndCount allocates 640 MB of small things, as a process of its own, and
// prints how often that was collected.
func allocateAndCount() {
	if os.Getenv(asHeap) == "with room" {
		KeepHeapRoom()
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for range 640 << 10 {
		kept = make([]byte, 1<<10)
	}
	runtime.ReadMemStats(&after)
	os.Stdout.WriteString(strconv.Itoa(int(after.NumGC - before.NumGC)))
}

func TestADaemonWithLittleInMemoryIsRarelyCollected(t *testing.T) {
	t.Parallel()
	collections := func(how, gogc string) int {
		c := exec.Command(os.Args[0])
		for _, v := range os.Environ() {
			if !strings.HasPrefix(v, "GOGC=") {
				c.Env = append(c.Env, v)
			}
		}
		c.Env = append(c.Env, asHeap+"="+how)
		if gogc != "" {
			c.Env = append(c.Env, "GOGC="+gogc)
		}
		var stderr bytes.Buffer
		c.Stderr = &stderr
		out, err := c.Output()
		n, bad := strconv.Atoi(string(out))
		if err != nil || bad != nil {
			t.Fatalf("%v %q %s", err, out, stderr.String())
		}
		return n
	}
	with, without, told := collections("with room", ""), collections("as ever", ""), collections("with room", "100")
	if with < 5 || with > 40 {
		t.Errorf("640 MB of garbage were collected %d times, want about 20", with)
	}
	if without < 3*with || told < 3*with {
		t.Errorf("collected %d times with room, %d times without, %d times with GOGC set", with, without, told)
	}
}

func TestALargeHeapIsCollectedAsEver(t *testing.T) {
	t.Parallel()
	for live, want := range map[uint64]int{0: 800, 1 << 20: 800, 16 << 20: 200, 32 << 20: 100, 8 << 30: 100} {
		if got := collectionPercent(live); got != want {
			t.Errorf("%d live bytes: GOGC %d, want %d", live, got, want)
		}
	}
}
