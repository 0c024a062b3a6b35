package nettest

import (
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
)

// world is one internet: a bridge that hosts and sites are plugged into. A second
// bridge beside it leads nowhere; what is cut off hangs there.
type world struct {
	t  *testing.T
	id string
}

var worlds atomic.Int32

// newWorld makes an empty internet for one test, which runs beside others.
func newWorld(t *testing.T) *world {
	t.Helper()
	if unavailable != "" {
		t.Skip(unavailable)
	}
	t.Parallel()
	w := &world{t: t, id: fmt.Sprintf("w%d-", worlds.Add(1))}
	w.namespace("net")
	for _, bridge := range []string{"net", "dark"} {
		w.ip("-n", w.id+"net", "link", "add", bridge, "type", "bridge")
		w.ip("-n", w.id+"net", "link", "set", bridge, "up")
	}
	return w
}

func (w *world) run(stdin, program string, args ...string) {
	w.t.Helper()
	cmd := exec.Command(program, args...)
	cmd.Stdin = strings.NewReader(stdin)
	if out, err := cmd.CombinedOutput(); err != nil {
		w.t.Fatalf("%s %s: %v: %s", program, strings.Join(args, " "), err, out)
	}
}

func (w *world) ip(args ...string) { w.t.Helper(); w.run("", "ip", args...) }

func (w *world) namespace(name string) (full string) {
	w.t.Helper()
	full = w.id + name
	w.ip("netns", "add", full)
	w.t.Cleanup(func() { w.ip("netns", "del", full) })
	w.ip("-n", full, "link", "set", "lo", "up")
	return full
}

// host is one machine, or the router of a site.
type host struct {
	w       *world
	name    string
	space   string // its namespace
	at      string // the namespace of the switch or router that it is plugged into
	port    string // its interface there
	address netip.Addr
	process *process // nil while none runs
}

// host plugs a machine into the internet, without a default route: there is
// nowhere else to go.
func (w *world) host(name, prefix string) *host {
	w.t.Helper()
	h := w.plug(name, w.id+"net", prefix)
	w.ip("-n", h.at, "link", "set", h.port, "master", "net")
	return h
}

func (w *world) plug(name, at, prefix string) *host {
	w.t.Helper()
	h := &host{w: w, name: name, space: w.namespace(name), at: at, port: "p-" + name, address: netip.MustParsePrefix(prefix).Addr()}
	w.ip("link", "add", h.port, "netns", at, "type", "veth", "peer", "name", "eth0", "netns", h.space)
	w.ip("-n", at, "link", "set", h.port, "up")
	address := []string{"-n", h.space, "addr", "add", prefix, "dev", "eth0"}
	if h.address.Is6() {
		address = append(address, "nodad")
	}
	w.ip(address...)
	w.ip("-n", h.space, "link", "set", "eth0", "up")
	return h
}

// in runs a program on the host.
func (h *host) in(stdin string, args ...string) {
	h.w.t.Helper()
	h.w.run(stdin, "nsenter", append([]string{"--net=/var/run/netns/" + h.space}, args...)...)
}

// How a site's router translates addresses.
const (
	keepsPorts = "masquerade"              // the same port outside for every destination
	symmetric  = "masquerade fully-random" // another port for each destination
)

// site is a LAN behind a router that translates addresses and lets nothing in that
// was not asked for.
type site struct {
	*host
	lan   string
	count int
}

func (w *world) site(name, prefix, lan, translation string) *site {
	w.t.Helper()
	s := &site{host: w.host(name, prefix), lan: lan}
	w.ip("-n", s.space, "link", "add", "lan", "type", "bridge")
	w.ip("-n", s.space, "addr", "add", lan+".1/24", "dev", "lan")
	w.ip("-n", s.space, "link", "set", "lan", "up")
	s.in("", "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
	s.in(`table ip site {
	chain out { type nat hook postrouting priority 100; oifname "eth0" `+translation+`
	}
	chain through { type filter hook forward priority 0; policy drop
		ct state established,related accept
		iifname "lan" accept
	}
	chain in { type filter hook input priority 0; iifname "eth0" ct state new drop
	}
}`, "nft", "-f", "-")
	return s
}

// inside plugs a machine into the site's LAN.
func (s *site) inside(name string) *host {
	s.w.t.Helper()
	s.count++
	h := s.w.plug(name, s.space, fmt.Sprintf("%s.%d/24", s.lan, s.count+1))
	s.w.ip("-n", s.space, "link", "set", h.port, "master", "lan")
	s.w.ip("-n", h.space, "route", "add", "default", "via", s.lan+".1")
	return h
}

// cut takes the host off the internet. It notices nothing itself.
func (h *host) cut() { h.w.t.Helper(); h.w.ip("-n", h.at, "link", "set", h.port, "master", "dark") }

// heal undoes cut.
func (h *host) heal() { h.w.t.Helper(); h.w.ip("-n", h.at, "link", "set", h.port, "master", "net") }

// refuse drops every packet of a protocol ("udp", "tcp") that comes to the host,
// without a word.
func (h *host) refuse(protocol string) {
	h.w.t.Helper()
	h.in("table inet no-"+protocol+" { chain in { type filter hook input priority 0; meta l4proto "+protocol+" drop; }; }", "nft", "-f", "-")
}

// accept undoes refuse.
func (h *host) accept(protocol string) {
	h.w.t.Helper()
	h.in("", "nft", "delete", "table", "inet", "no-"+protocol)
}

// slow makes the host's link carry a kilobyte a second each way, with five seconds
// of queue.
func (h *host) slow() {
	h.w.t.Helper()
	for space, link := range map[string]string{h.space: "eth0", h.at: h.port} {
		h.w.run("", "tc", "-n", space, "qdisc", "add", "dev", link, "root", "tbf", "rate", "8kbit", "burst", "1600", "latency", "5s")
	}
}
