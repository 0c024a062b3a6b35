// Package agent is the part that every agent inside a VM has in common: it reads
// the seed that the VM was born with, joins the mesh, exchanges the seed's
// one-time token for a job certificate, keeps that fresh, stands in attendance
// at wrk-ork with reports, and does what it is told.
//
// What an agent says of itself is the tenant's word: the tenant has root in the
// VM, can read this process's key and can change its reports. Nothing outside
// may rely on more than the certificate proves.
//
// The agent serves whether or not wrk-ork can be reached: certificate, roster
// and addresses of the network are kept in the state directory, and every call
// to wrk-ork is tried again with growing, jittered pauses.
//
// It does not run shells or engines (see Work), does not decide about jobs, does
// not know Kubernetes, and never sends its key or token anywhere but to wrk-ork.
package agent
