package overlay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	nad "github.com/k8snetworkplumbingwg/network-attachment-definition-client/pkg/apis/k8s.cni.cncf.io/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

var kind = schema.GroupResource{Group: "k8s.cni.cncf.io", Resource: "network-attachment-definitions"}

// memory is the cluster's part: names are unique, and an answer may be lost after or
// before the deed.
type memory struct {
	mu   sync.Mutex
	all  map[string]*nad.NetworkAttachmentDefinition
	uids int
	// before and after are asked at each call and make it fail there.
	before, after func(verb string) error
}

func newMemory() *memory {
	never := func(string) error { return nil }
	return &memory{all: map[string]*nad.NetworkAttachmentDefinition{}, before: never, after: never}
}

func (m *memory) Create(_ context.Context, o *nad.NetworkAttachmentDefinition, _ metav1.CreateOptions) (*nad.NetworkAttachmentDefinition, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.before("create"); err != nil {
		return nil, err
	}
	if m.all[o.Name] != nil {
		return nil, apierrors.NewAlreadyExists(kind, o.Name)
	}
	m.uids++
	c := o.DeepCopy()
	c.UID, c.ResourceVersion = types.UID(fmt.Sprint(m.uids)), fmt.Sprint(m.uids)
	m.all[o.Name] = c
	return c.DeepCopy(), m.after("create")
}

func (m *memory) Get(_ context.Context, name string, _ metav1.GetOptions) (*nad.NetworkAttachmentDefinition, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if o := m.all[name]; o != nil {
		return o.DeepCopy(), nil
	}
	return nil, apierrors.NewNotFound(kind, name)
}

func (m *memory) List(_ context.Context, o metav1.ListOptions) (*nad.NetworkAttachmentDefinitionList, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.before("list"); err != nil {
		return nil, err
	}
	out := &nad.NetworkAttachmentDefinitionList{}
	for _, a := range m.all {
		if _, of, ok := strings.Cut(o.LabelSelector, label.Attempt+"="); !ok || a.Labels[label.Attempt] == of {
			out.Items = append(out.Items, *a.DeepCopy())
		}
	}
	return out, nil
}

func (m *memory) Patch(_ context.Context, name string, form types.PatchType, patch []byte, _ metav1.PatchOptions, _ ...string) (*nad.NetworkAttachmentDefinition, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.before("patch"); err != nil {
		return nil, err
	}
	a := m.all[name]
	if a == nil {
		return nil, apierrors.NewNotFound(kind, name)
	}
	var of struct {
		Metadata struct {
			ResourceVersion string
			Labels          map[string]*string
			Annotations     map[string]string
		}
	}
	if err := json.Unmarshal(patch, &of); err != nil || form != types.MergePatchType {
		return nil, fmt.Errorf("a patch of form %s: %w", form, err)
	}
	if of.Metadata.ResourceVersion != a.ResourceVersion {
		return nil, apierrors.NewConflict(kind, name, errors.New("another version"))
	}
	m.uids++
	c := a.DeepCopy()
	c.ResourceVersion = fmt.Sprint(m.uids)
	maps.Copy(c.Annotations, of.Metadata.Annotations)
	for k, v := range of.Metadata.Labels {
		if delete(c.Labels, k); v != nil {
			c.Labels[k] = *v
		}
	}
	m.all[name] = c
	return c.DeepCopy(), m.after("patch")
}

func (m *memory) Delete(_ context.Context, name string, o metav1.DeleteOptions) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.before("delete"); err != nil {
		return err
	}
	a := m.all[name]
	if a == nil {
		return apierrors.NewNotFound(kind, name)
	}
	if o.Preconditions == nil || o.Preconditions.UID == nil || *o.Preconditions.UID != a.UID {
		return apierrors.NewConflict(kind, name, errors.New("another uid"))
	}
	delete(m.all, name)
	return m.after("delete")
}

func driver(a Attachments, last int, now int64) *OVS {
	return resting(a, last, 0, func() time.Time { return time.Unix(0, now) })
}

func resting(a Attachments, last int, quarantine time.Duration, now func() time.Time) *OVS {
	return NewOVS(a, Options{
		Bridge: "br-lab", First: 100, Last: last, MTU: 1450, Subnet: netip.MustParsePrefix("10.64.0.0/24"), Quarantine: quarantine, Now: now,
	})
}

// TestNoTwoAttemptsEverShareAVLAN lets two workers that know nothing of each other
// allocate and give back in any order, with lost answers and restarts in between, and
// holds every VLAN against its quarantine.
func TestNoTwoAttemptsEverShareAVLAN(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		const size = 4
		m := newMemory()
		lost := errors.New("connection reset")
		var failing string // what the next call of this verb does
		fail := func(moment string) func(string) error {
			return func(verb string) error {
				if failing == moment+" "+verb {
					failing = ""
					return lost
				}
				return nil
			}
		}
		m.before, m.after = fail("before"), fail("after")
		quarantine := rapid.SampledFrom([]time.Duration{0, time.Minute}).Draw(t, "quarantine")
		now := time.Unix(1_800_000_000, 0)
		clock := func() time.Time { return now }
		racers := []*OVS{resting(m, 99+size, quarantine, clock), resting(m, 99+size, quarantine, clock)}
		holds := map[string]string{}    // what an attempt was told that it has
		freed := map[string]time.Time{} // when a VLAN was last given back
		attempts := []string{"a-0", "a-1", "a-2", "a-3", "a-4", "a-5"}
		t.Repeat(map[string]func(*rapid.T){
			"allocate": func(t *rapid.T) {
				a, who := rapid.SampledFrom(attempts).Draw(t, "attempt"), rapid.IntRange(0, 1).Draw(t, "racer")
				failing = rapid.SampledFrom([]string{"", "", "before list", "before create", "after create"}).Draw(t, "fails")
				held := map[string]bool{} // by this attempt, whatever it was told
				for name, o := range m.all {
					held[name] = o.Labels[label.Attempt] == a
				}
				name, err := racers[who].Allocate(t.Context(), a, &Plan{Bridge: "br-lab", MTU: 1450}, nil)
				failing = ""
				var full *Exhausted
				switch {
				case errors.As(err, &full):
					if len(m.all) != size {
						t.Fatalf("exhausted with %d of %d in use", len(m.all), size)
					}
					for name, o := range m.all {
						if racers[who].rested(o, "") {
							t.Fatalf("exhausted while %s is free", name)
						}
					}
				case err != nil:
					if !errors.Is(err, lost) {
						t.Fatal(err)
					}
				case holds[a] != "" && holds[a] != name:
					t.Fatalf("%s had %s and was given %s", a, holds[a], name)
				case holds[a] == "" && now.Before(freed[name].Add(quarantine)) && !held[name]:
					t.Fatalf("%s was given back at %s and is given again at %s", name, freed[name], now)
				default:
					holds[a] = name
				}
			},
			"give back": func(t *rapid.T) {
				a, who := rapid.SampledFrom(attempts).Draw(t, "attempt"), rapid.IntRange(0, 1).Draw(t, "racer")
				failing = rapid.SampledFrom([]string{"", "", "before list", "before delete", "after delete", "before patch", "after patch"}).Draw(t, "fails")
				had := ""
				for name, o := range m.all {
					if o.Labels[label.Attempt] == a {
						had = name
					}
				}
				left, err := racers[who].Release(t.Context(), a)
				failing = ""
				if had != "" && (m.all[had] == nil || m.all[had].Labels[label.Attempt] != a) {
					freed[had] = now
				}
				if err == nil && len(left) == 0 {
					delete(holds, a)
				} else if !errors.Is(err, lost) {
					t.Fatalf("left %v, %v", left, err)
				}
				if err != nil { // it may be gone or not: only the cluster knows
					delete(holds, a)
				}
			},
			"sweep": func(t *rapid.T) {
				if err := racers[rapid.IntRange(0, 1).Draw(t, "racer")].Sweep(t.Context(), ""); err != nil {
					t.Fatal(err)
				}
			},
			"time passes": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.Int64Range(1, int64(40*time.Second)).Draw(t, "by")))
			},
			"restart": func(t *rapid.T) {
				racers[rapid.IntRange(0, 1).Draw(t, "racer")] = resting(m, 99+size, quarantine, clock)
			},
			"": func(t *rapid.T) {
				owners, vlans := map[string]string{}, map[string]string{}
				for name, o := range m.all {
					if other := vlans[o.Spec.Config]; other != "" {
						t.Fatalf("%s and %s are one VLAN: %s", name, other, o.Spec.Config)
					}
					vlans[o.Spec.Config], owners[name] = name, o.Labels[label.Attempt]
				}
				for a, name := range holds {
					if owners[name] != a {
						t.Fatalf("%s was given %s, which is %q's", a, name, owners[name])
					}
				}
			},
		})
	})
}

func TestARaceForTheLastVLANsHasOneWinnerEach(t *testing.T) {
	t.Parallel()
	m := newMemory()
	racers := []*OVS{driver(m, 119, 0), driver(m, 119, 7)}
	var wg sync.WaitGroup
	var mu sync.Mutex
	given, refused := map[string]string{}, 0
	for i := range 40 {
		wg.Go(func() {
			name, err := racers[i%2].Allocate(context.Background(), fmt.Sprint("a-", i), &Plan{Bridge: "br-lab"}, nil)
			mu.Lock()
			defer mu.Unlock()
			var full *Exhausted
			switch {
			case errors.As(err, &full):
				refused++
				if !strings.Contains(full.Words, "all 20 VLANs of bridge br-lab, 100 to 119, are in use") {
					t.Errorf("refused with %q", full.Words)
				}
			case err != nil:
				t.Error(err)
			case given[name] != "":
				t.Errorf("%s was given to %s and a-%d", name, given[name], i)
			default:
				given[name] = fmt.Sprint("a-", i)
			}
		})
	}
	wg.Wait()
	if len(given) != 20 || refused != 20 {
		t.Errorf("%d given, %d refused", len(given), refused)
	}
}

func TestAVLANThatWasGivenBackIsTakenAgainLast(t *testing.T) {
	t.Parallel()
	m := newMemory()
	d := driver(m, 103, 0)
	var order []string
	for i := range 5 {
		a := fmt.Sprint("a-", i)
		name, err := d.Allocate(t.Context(), a, &Plan{Bridge: "br-lab"}, nil)
		if err != nil {
			t.Fatal(err)
		}
		order = append(order, name)
		if left, err := d.Release(t.Context(), a); err != nil || len(left) > 0 {
			t.Fatalf("left %v, %v", left, err)
		}
	}
	if want := []string{"br-lab-vlan-100", "br-lab-vlan-101", "br-lab-vlan-102", "br-lab-vlan-103", "br-lab-vlan-100"}; !slices.Equal(order, want) {
		t.Errorf("order %v", order)
	}
}

// TestAVLANThatWasGivenBackRestsWhoeverAsks walks through a quarantine, with a restart
// and a second worker of the namespace.
func TestAVLANThatWasGivenBackRestsWhoeverAsks(t *testing.T) {
	t.Parallel()
	m := newMemory()
	now := time.Date(2026, 12, 2, 9, 0, 0, 1, time.UTC)
	clock := func() time.Time { return now }
	labels := map[string]string{label.Network: "n", label.Rack: "us", label.ManagedBy: label.Manager, label.Job: "j-1", label.Project: "p-1"}
	d := resting(m, 101, 10*time.Minute, clock)
	allocate := func(d *OVS, attempt string) (string, error) {
		return d.Allocate(t.Context(), attempt, &Plan{Bridge: "br-lab"}, labels)
	}
	first, err := allocate(d, "a-1")
	if err != nil {
		t.Fatal(err)
	}
	second, err := allocate(d, "a-2")
	if err != nil {
		t.Fatal(err)
	}
	if left, err := d.Release(t.Context(), "a-1"); err != nil || len(left) > 0 {
		t.Fatalf("left %v, %v", left, err)
	}
	o := m.all[first]
	if !Quarantined(o) || o.Labels[label.Job] != "" || o.Labels[label.Project] != "" || o.Labels[label.Network] != "n" || o.Labels[label.Rack] != "us" {
		t.Errorf("in quarantine: %v %v", o.Labels, o.Annotations)
	}
	if words, _, _ := d.Preflight(t.Context(), []*corev1.Node{bridged("br-lab"), bridged("br-lab")}); !strings.Contains(words, "1 of 2 VLANs are in use, 1 in quarantine") {
		t.Errorf("preflight: %s", words)
	}

	// Neither this worker nor another nor the next life of one gives it out.
	for _, who := range []*OVS{d, resting(m, 101, 0, clock), resting(m, 101, 10*time.Minute, clock)} {
		var full *Exhausted
		_, err := allocate(who, "a-3")
		if !errors.As(err, &full) || !strings.Contains(full.Words, "all 2 VLANs of bridge br-lab, 100 to 101, are taken, 1 of them in quarantine (the next is free at 2026-12-02T09:10:01Z)") {
			t.Errorf("refused with %v", err)
		}
		if err := who.Sweep(t.Context(), "n"); err != nil || m.all[first] == nil {
			t.Errorf("swept too early, %v", err)
		}
	}
	// The attempt that had it learns that it is lost.
	var lost *Lost
	if _, err := d.Allocate(t.Context(), "a-1", &Plan{Bridge: "br-lab", Network: first}, labels); !errors.As(err, &lost) || !strings.Contains(lost.Words, "in quarantine") {
		t.Errorf("%v", err)
	}

	// After that it is taken over, or removed where nobody wants it.
	now = now.Add(10*time.Minute + time.Second)
	if got, err := allocate(resting(m, 101, 10*time.Minute, clock), "a-3"); err != nil || got != first || Quarantined(m.all[first]) {
		t.Errorf("got %s, %v", got, err)
	}
	if left, err := d.Release(t.Context(), "a-2"); err != nil || len(left) > 0 {
		t.Fatalf("left %v, %v", left, err)
	}
	now = now.Add(11 * time.Minute)
	if err := d.Sweep(t.Context(), "another"); err != nil || m.all[second] == nil {
		t.Errorf("another network's was swept, %v", err)
	}
	if err := d.Sweep(t.Context(), "n"); err != nil || m.all[second] != nil || m.all[first] == nil {
		t.Errorf("after the sweep: %v, %v", m.all, err)
	}
	m.before = func(string) error { return apierrors.NewNotFound(kind, "") }
	if err := d.Sweep(t.Context(), "n"); err != nil {
		t.Errorf("without Multus: %v", err)
	}
}

// bridged is a node with these bridges.
func bridged(bridges ...string) *corev1.Node {
	n := &corev1.Node{}
	n.Status.Capacity = corev1.ResourceList{}
	for _, b := range bridges {
		n.Status.Capacity[corev1.ResourceName(Marker(b))] = resource.MustParse("1k")
	}
	return n
}

func TestANetworkRemovedByHandIsMadeAnewUnlessAnotherHasItNow(t *testing.T) {
	t.Parallel()
	m := newMemory()
	d := driver(m, 100, 0)
	plan := &Plan{Bridge: "br-lab", MTU: 1450}
	var err error
	if plan.Network, err = d.Allocate(t.Context(), "a-1", plan, map[string]string{label.Rack: "us"}); err != nil {
		t.Fatal(err)
	}
	delete(m.all, plan.Network)
	if _, err := d.Allocate(t.Context(), "a-1", plan, map[string]string{label.Rack: "us"}); err != nil || m.all[plan.Network].Labels[label.Rack] != "us" {
		t.Fatalf("%v, %v", m.all[plan.Network], err)
	}
	delete(m.all, plan.Network)
	if _, err := d.Allocate(t.Context(), "a-2", &Plan{Bridge: "br-lab"}, nil); err != nil {
		t.Fatal(err)
	}
	var lost *Lost
	if _, err := d.Allocate(t.Context(), "a-1", plan, nil); !errors.As(err, &lost) {
		t.Errorf("%v", err)
	}
}

func TestMachinesOfANetworkHaveAddressesOfTheirOwn(t *testing.T) {
	t.Parallel()
	d := driver(newMemory(), 199, 0)
	plan := d.Plan()
	plan.Network = "br-lab-vlan-100"
	seen := map[string]bool{}
	for k := range 64 {
		p := d.Render(plan, "a-1", k)
		text := string(p.NetworkData)
		own := fmt.Sprintf("addresses: [10.64.0.%d/24]", 10+k)
		if !strings.Contains(text, own) || !strings.Contains(text, "mtu: 1450") || len(p.Interfaces) != 2 || p.Networks[1].Multus.NetworkName != plan.Network {
			t.Fatalf("machine %d:\n%s%v", k, text, p.Networks)
		}
		for _, i := range p.Interfaces {
			if seen[i.MacAddress] || !strings.HasPrefix(i.MacAddress, "02:") || !strings.Contains(text, i.MacAddress) {
				t.Errorf("machine %d: hardware address %s", k, i.MacAddress)
			}
			seen[i.MacAddress] = true
		}
		if again := d.Render(plan, "a-1", k); string(again.NetworkData) != text {
			t.Error("the same machine is rendered otherwise")
		}
	}
	if off := NewOVS(newMemory(), Options{Off: true, Now: time.Now}); off.Plan() != nil {
		t.Error("an overlay that is off makes plans")
	}
}

func TestPreflightNamesWhatIsMissingOfTheOverlay(t *testing.T) {
	t.Parallel()
	node := bridged
	m := newMemory()
	d := driver(m, 101, 0)
	if words, remedy, good := d.Preflight(t.Context(), []*corev1.Node{node("br-lab"), node("other")}); good || remedy == "" || !strings.Contains(words, "1 of 2 nodes have bridge br-lab") {
		t.Errorf("one bridge: %s; %s", words, remedy)
	}
	if _, err := d.Allocate(t.Context(), "a-1", &Plan{Bridge: "br-lab"}, nil); err != nil {
		t.Fatal(err)
	}
	if words, _, good := d.Preflight(t.Context(), []*corev1.Node{node("br-lab"), node("br-lab", "other")}); !good || !strings.Contains(words, "1 of 2 VLANs are in use") {
		t.Errorf("two bridges: %s", words)
	}
	m.before = func(string) error { return apierrors.NewNotFound(kind, "") }
	if words, remedy, good := d.Preflight(t.Context(), nil); good || !strings.Contains(words, "no NetworkAttachmentDefinitions") || !strings.Contains(remedy, "Multus") {
		t.Errorf("no Multus: %s; %s", words, remedy)
	}
	if left, err := d.Release(t.Context(), "a-1"); err != nil || len(left) > 0 {
		t.Errorf("giving back without Multus: %v, %v", left, err)
	}
}
