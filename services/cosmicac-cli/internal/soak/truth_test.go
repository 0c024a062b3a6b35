package soak

import (
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/demo"
)

// object is what the rules ask of a pod, a VMI or a ConfigMap.
type object struct {
	Metadata struct {
		Name              string            `json:"name"`
		UID               string            `json:"uid"`
		Labels            map[string]string `json:"labels"`
		DeletionTimestamp string            `json:"deletionTimestamp"`
	} `json:"metadata"`
	Data map[string]string `json:"data"` // of a ConfigMap
	Spec struct {
		NodeName   string `json:"nodeName"`
		Containers []struct {
			Resources struct {
				Requests map[string]any `json:"requests"`
			} `json:"resources"`
		} `json:"containers"`
	} `json:"spec"`
	Status struct {
		Phase string `json:"phase"`
	} `json:"status"`
}

func (o *object) final() bool { return o.Status.Phase == "Succeeded" || o.Status.Phase == "Failed" }

// gpus counts what a pod asks for.
func (o *object) gpus() int {
	n := 0
	for _, c := range o.Spec.Containers {
		for name, q := range c.Resources.Requests {
			if strings.HasPrefix(name, "nvidia.com/") {
				i, _ := strconv.Atoi(fmt.Sprint(q))
				n += i
			}
		}
	}
	return n
}

// list reads the objects of one kind in the workers' namespace.
func (k *kube) list(group, resource string) ([]object, error) {
	var l struct{ Items []object }
	return l.Items, k.get(group+"/namespaces/"+demo.WorkerNamespace+"/"+resource, &l)
}

// capacity of the embedded cluster's default nodes.
func capacity(node string) int {
	if strings.HasPrefix(node, "us-") {
		return 8
	}
	return 4
}

// outcome is what an attempt ended with; a rule says that it is written once.
type outcome struct{ State, Reason string }

// rules remembers what must not change, over a whole run.
type rules struct {
	p        *platform
	outcomes map[string]outcome // by attempt
	machines map[string]string  // uid by attempt and node
	attempts map[string]uint32  // highest number by replica
}

func newRules(p *platform) *rules {
	return &rules{p: p, outcomes: map[string]outcome{}, machines: map[string]string{}, attempts: map[string]uint32{}}
}

// check holds cluster and API against the rules and returns what is broken.
// What cannot be read now, since its daemon is down, is checked the next time.
func (r *rules) check(jobs []string) []string {
	broken := r.cluster()
	for _, id := range jobs {
		j, err := r.p.job(id)
		if err != nil {
			continue
		}
		broken = append(broken, r.job(&j)...)
	}
	var racks struct{ Racks []client.Rack }
	if err := r.p.ask("GET", "/api/v1/racks", nil, nil, &racks); err == nil {
		broken = append(broken, ledger(racks.Racks)...)
	}
	return broken
}

// cluster is the truth: no node gives more cards than it has, and no replica
// has machines of two attempts.
func (r *rules) cluster() (broken []string) {
	pods, err := r.p.kube.list("/api/v1", "pods")
	if err != nil {
		return nil
	}
	used := map[string]int{}
	for i := range pods {
		if !pods[i].final() && pods[i].Spec.NodeName != "" {
			used[pods[i].Spec.NodeName] += pods[i].gpus()
		}
	}
	for _, node := range slices.Sorted(maps.Keys(used)) {
		if used[node] > capacity(node) {
			broken = append(broken, fmt.Sprintf("cards held twice: pods on %s hold %d of %d", node, used[node], capacity(node)))
		}
	}
	vmis, err := r.p.kube.list("/apis/kubevirt.io/v1", "virtualmachineinstances")
	if err != nil {
		return broken
	}
	of := map[string]map[string]bool{}
	for i := range vmis {
		labels := vmis[i].Metadata.Labels
		if vmis[i].final() {
			continue
		}
		replica := labels["cosmicac.dev/replica"]
		if of[replica] == nil {
			of[replica] = map[string]bool{}
		}
		of[replica][labels["cosmicac.dev/attempt"]] = true
	}
	for _, replica := range slices.Sorted(maps.Keys(of)) {
		if len(of[replica]) > 1 {
			broken = append(broken, fmt.Sprintf("two copies: replica %s has machines of attempts %v", replica, slices.Sorted(maps.Keys(of[replica]))))
		}
	}
	return broken
}

var ended = []string{"stopped", "succeeded", "failed", "cancelled"}

// job looks at what a job's record may never do.
func (r *rules) job(j *client.Job) (broken []string) {
	for _, rep := range j.ReplicaList {
		for _, a := range rep.Attempts {
			now := outcome{a.State, a.Reason}
			if was, ok := r.outcomes[a.ID]; ok && was != now {
				broken = append(broken, fmt.Sprintf("outcome rewritten: attempt %s of %s was %v and is %v", a.ID, j.Name, was, now))
			}
			if slices.Contains(ended, a.State) {
				r.outcomes[a.ID] = now
			}
			for _, n := range a.Nodes {
				key := a.ID + " on " + n.NodeName
				if was := r.machines[key]; was != "" && n.VMIUID != "" && was != n.VMIUID {
					broken = append(broken, fmt.Sprintf("another machine: attempt %s had %s and has %s", key, was, n.VMIUID))
				}
				if n.VMIUID != "" {
					r.machines[key] = n.VMIUID
				}
			}
			r.attempts[rep.ID] = max(r.attempts[rep.ID], a.Number)
		}
		if n := len(rep.Attempts); n > 0 && rep.Attempts[n-1].Number < r.attempts[rep.ID] && rep.Attempts[0].Number < r.attempts[rep.ID] {
			broken = append(broken, fmt.Sprintf("attempt lost: replica %s had attempt %d, its list holds %d attempts", rep.ID, r.attempts[rep.ID], n))
		}
	}
	return broken
}

// ledger looks at the counts that the racks show. They are unsigned: a
// negative one would be huge.
func ledger(racks []client.Rack) (broken []string) {
	for _, rack := range racks {
		for _, n := range rack.Nodes {
			for _, g := range n.GPUs {
				if g.Total > 1000 || g.Held > 1000 || g.Offerable > 1000 || g.Healthy > g.Total || g.Offerable > g.Total || g.Held+g.Offerable > g.Total {
					broken = append(broken, fmt.Sprintf("ledger: %s on %s: total %d, healthy %d, held %d, offerable %d", g.Model, n.Name, g.Total, g.Healthy, g.Held, g.Offerable))
				}
			}
		}
	}
	return broken
}

// same demands that the ledger is the truth: for each node, held is what pods
// hold.
func (r *rules) same() string {
	var racks struct{ Racks []client.Rack }
	if err := r.p.ask("GET", "/api/v1/racks", nil, nil, &racks); err != nil {
		return err.Error()
	}
	pods, err := r.p.kube.list("/api/v1", "pods")
	if err != nil {
		return err.Error()
	}
	used := map[string]int{}
	for i := range pods {
		if !pods[i].final() {
			used[pods[i].Spec.NodeName] += pods[i].gpus()
		}
	}
	for _, rack := range racks.Racks {
		if !rack.Connected {
			return rack.ID + " is not connected"
		}
		for _, n := range rack.Nodes {
			for _, g := range n.GPUs {
				if int(g.Held) != used[n.Name] || int(g.Offerable) != int(g.Total)-used[n.Name] {
					return fmt.Sprintf("%s: held %d, offerable %d of %d; pods hold %d", n.Name, g.Held, g.Offerable, g.Total, used[n.Name])
				}
			}
		}
	}
	return ""
}

// jobs lists the ids of all jobs that the API shows.
func (p *platform) jobs() ([]string, error) {
	var ids []string
	for page := ""; ; {
		var list struct {
			Jobs          []client.Job `json:"jobs"`
			NextPageToken string       `json:"next_page_token"`
		}
		path := "/api/v1/jobs"
		if page != "" {
			path += "?page_token=" + url.QueryEscape(page)
		}
		if err := p.ask("GET", path, nil, nil, &list); err != nil {
			return nil, err
		}
		for _, j := range list.Jobs {
			ids = append(ids, j.ID)
		}
		if page = list.NextPageToken; page == "" {
			return ids, nil
		}
	}
}
