package demo

import (
	"context"
	"path/filepath"
)

// What tests of the whole platform need of a running one beside its public face.

// Processes names the supervised processes in the order of their start.
func (d *Demo) Processes() []string {
	var names []string
	for _, m := range d.group.parts {
		names = append(names, m.process.name)
	}
	return names
}

// PID is a process's id; 0 while it is down, or when there is none of the name.
func (d *Demo) PID(name string) int {
	if p := d.child(name); p != nil {
		return p.PID()
	}
	return 0
}

// Ready says whether a process serves: a daemon by its status file, anything
// else by running.
func (d *Demo) Ready(name string) bool {
	for _, x := range d.daemons {
		if x.Name == name {
			return d.status(x).Ready
		}
	}
	return d.PID(name) != 0
}

// Password is the administrator's.
func (d *Demo) Password() string { return d.password }

// Kubeconfig is the file with full rights over the embedded cluster.
func (d *Demo) Kubeconfig() string { return d.cluster.Kubeconfig }

// ClusterDirectory is the state folder of the embedded cluster.
func (d *Demo) ClusterDirectory() string { return filepath.Join(d.dir, "cluster", "data") }

// NothingLeft asks the cluster itself, and the racks, until neither holds
// anything of a job; the error says what remains after a minute.
func (d *Demo) NothingLeft(ctx context.Context) error { return d.nothingLeft(ctx) }

// LastWords are the ends of all daemons' logs.
func (d *Demo) LastWords() map[string]string {
	words := map[string]string{}
	for _, x := range d.daemons {
		words[x.Name] = tail(d.files(x).Log, 3000)
	}
	return words
}
