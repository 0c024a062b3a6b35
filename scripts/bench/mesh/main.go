// Command bench-mesh measures the mesh beside what others build on: gRPC over TLS,
// NATS, Holepunch, and bare TCP and TLS as the floor. Servers and clients are
// processes of their own, which this binary starts as copies of itself. All of it
// stays on the loopback interface. See README.md.
package main

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// bench is one run.
type bench struct {
	out       io.Writer // progress and tables
	began     time.Time
	results   results
	only      []string // subjects of unary, bulk and beside; all if empty
	holepunch string   // the folder with its modules; empty when not installed
	profiles  string   // folder for processor profiles; empty for none

	rounds        int
	slice         time.Duration // of one load
	bulkBytes     int64
	bulkSlice     time.Duration // at most, of one stream of bulk
	connections   int
	dhts          []dht
	backRounds    int
	strangerSlice time.Duration
}

// full takes up to 20 minutes on two cores, short about three: it leaves out the DHT
// of 200 nodes, which alone takes minutes to form on them.
func full() *bench {
	return &bench{rounds: 7, slice: time.Second, bulkBytes: 256e6, bulkSlice: 4 * time.Second, connections: 1000,
		dhts: []dht{{5, 20}, {50, 20}, {200, 20}}, backRounds: 5, strangerSlice: 8 * time.Second}
}

func short() *bench {
	return &bench{rounds: 3, slice: 250 * time.Millisecond, bulkBytes: 256e6, bulkSlice: time.Second, connections: 250,
		dhts: []dht{{5, 5}, {50, 7}}, backRounds: 1, strangerSlice: 4 * time.Second}
}

// figure is what can be measured by itself.
type figure struct {
	name    string
	measure func(*bench) error
}

var figures = []figure{
	{"unary", (*bench).measureUnary},
	{"bulk", (*bench).measureBulk},
	{"beside", (*bench).measureBeside},
	{"memory", (*bench).measureMemory},
	{"find", (*bench).measureFind},
	{"reconnect", (*bench).measureReconnect},
	{"stranger", (*bench).measureStranger},
}

func main() {
	if os.Getenv(asProgram) != "" {
		if err := serveProgram(); err != nil {
			broke("serve", err)
		}
		return
	}
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "bench-mesh:", err)
		os.Exit(1)
	}
}

func run(out io.Writer) error {
	var names []string
	for _, f := range figures {
		names = append(names, f.name)
	}
	wanted := flag.String("figures", strings.Join(names, ","), "what to measure")
	quick := flag.Bool("short", false, "fewer and shorter rounds: about three minutes")
	rounds := flag.Int("rounds", 0, "rounds of unary, bulk and beside; 0 is the default")
	seconds := flag.Float64("seconds", 0, "of one load in a round; 0 is the default")
	only := flag.String("subjects", "", "the subjects of unary, bulk and beside, such as 'ours TCP,gRPC over TLS'; empty is all")
	nodes := flag.String("dht", "", "sizes of the DHT for find, such as 5,50,200; empty is the default")
	file := flag.String("json", "", "write one JSON object a line into this file")
	profiles := flag.String("cpuprofile", "", "write processor profiles of unary at 128 callers, of bulk and of stranger into this folder")
	flag.Parse()

	b := full()
	if *quick {
		b = short()
	}
	b.out, b.began, b.profiles = out, time.Now(), *profiles
	if *rounds > 0 {
		b.rounds = *rounds
	}
	if *seconds > 0 {
		b.slice = time.Duration(*seconds * float64(time.Second))
	}
	if *only != "" {
		b.only = strings.Split(*only, ",")
		for _, name := range b.only {
			if !slices.ContainsFunc(subjects, func(s subject) bool { return s.name == name }) {
				return fmt.Errorf("there is no subject %q: see README.md", name)
			}
		}
	}
	if *nodes != "" {
		probes := b.dhts[len(b.dhts)-1].probes
		b.dhts = nil
		for _, text := range strings.Split(*nodes, ",") {
			n, err := strconv.Atoi(text)
			if err != nil || n < bootstraps+1 {
				return fmt.Errorf("-dht %s: sizes are whole numbers from %d on", *nodes, bootstraps+1)
			}
			b.dhts = append(b.dhts, dht{n, probes})
		}
	}
	chosen := strings.Split(*wanted, ",")
	for _, name := range chosen {
		if !slices.Contains(names, name) {
			return fmt.Errorf("there is no figure %q: choose from %s", name, strings.Join(names, ","))
		}
	}
	if b.profiles != "" {
		if err := os.MkdirAll(b.profiles, 0o755); err != nil {
			return err
		}
	}
	return b.run(chosen, *file)
}

// run measures the chosen figures and prints them. A figure that breaks does not
// keep the others from being measured; the error names each.
func (b *bench) run(chosen []string, file string) error {
	machine := shape()
	fmt.Fprintf(b.out, "bench-mesh, %s\n%s\n", b.began.UTC().Format("2 January 2006 15:04 UTC"), machine)
	dir, err := installHolepunch(b.out)
	if err != nil {
		fmt.Fprintf(b.out, "not measured: %s, %v\n", holepunch, err)
	}
	b.holepunch = dir
	var broken error
	for _, f := range figures {
		if !slices.Contains(chosen, f.name) {
			continue
		}
		if err := f.measure(b); err != nil {
			b.say("%s broke: %v", f.name, err)
			broken = errors.Join(broken, fmt.Errorf("%s: %w", f.name, err))
		}
	}
	if file != "" {
		f, err := os.Create(file)
		if err != nil {
			return err
		}
		if err := errors.Join(b.results.writeJSON(f), f.Close()); err != nil {
			return err
		}
	}
	fmt.Fprintf(b.out, "\nbench-mesh, %s, took %s\n%s\nload average at the end %s\n", b.began.UTC().Format("2 January 2006 15:04 UTC"),
		time.Since(b.began).Round(time.Second), machine, loadAverage())
	fmt.Fprintf(b.out, "%d interleaved rounds; values are medians over rounds, a p99 is the median of the rounds' p99\n", b.rounds)
	if b.holepunch == "" {
		fmt.Fprintf(b.out, "not installed, so not measured: %s\n", holepunch)
	}
	b.results.print(b.out)
	printGoals(b.out, &b.results, chosen)
	return broken
}

// say shows progress.
func (b *bench) say(format string, args ...any) {
	fmt.Fprintf(b.out, "[%4.0fs] %s\n", time.Since(b.began).Seconds(), fmt.Sprintf(format, args...))
}

// shape describes the machine.
func shape() string {
	var kernel syscall.Utsname
	release := "unknown kernel"
	if err := syscall.Uname(&kernel); err == nil {
		var text []byte
		for _, c := range kernel.Release {
			if c == 0 {
				break
			}
			text = append(text, byte(c))
		}
		release = "Linux " + string(text)
	}
	node := "no Node"
	if version, err := exec.Command("node", "--version").Output(); err == nil {
		node = "Node " + strings.TrimSpace(string(version))
	}
	return fmt.Sprintf("%d cores (%s), %s of memory, %s, %s, %s, load average %s", runtime.NumCPU(), field("/proc/cpuinfo", "model name"),
		field("/proc/meminfo", "MemTotal"), release, runtime.Version(), node, loadAverage())
}

// field is the first value of a name in a file of the kernel's.
func field(file, name string) string {
	f, err := os.Open(file)
	if err != nil {
		return "unknown"
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if key, value, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return "unknown"
}

func loadAverage() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	first, _, _ := strings.Cut(string(b), " ")
	return first
}
