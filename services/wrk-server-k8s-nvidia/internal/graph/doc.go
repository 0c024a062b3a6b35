// Package graph builds and takes down the cluster objects of attempts.
//
// Each attempt is a small graph:
//
//	anchor ConfigMap <attempt>           the claim; owner of all but the disk
//	 +- Secret <attempt>-n<k>-seed       cloud-init
//	 +- NetworkPolicy <attempt>
//	 +- Service <attempt>-n<k>-ports     where the job declares public ports
//	 +- DataVolume <job>-r<i>-n<k>-root  belongs to the job, kept between attempts
//	 +- NetworkAttachmentDefinition      several machines: their own network; no owner, since
//	 |                                   it must stay while a machine is in it
//	 +- VirtualMachineInstance <attempt>-n<k>, with the job's volumes, which package volume
//	                                     makes and removes
//
// An Engine works on one attempt at a time per id, level-triggered: it looks at
// what the cluster shows and does the next thing, so it can be killed anywhere
// and go on. A create is a get-or-create by a name made of ids, and an object
// of that name with another owner is an error, never adopted. Taking down walks
// backwards, each delete bound to a uid, each absence confirmed by a live read;
// finalizers are never removed and nothing is deleted by force. The anchor goes
// last, and with it the claim.
//
// It does not choose nodes (ork), grant GPUs (package claim), replace a machine
// (a new attempt does) or judge what happens inside a guest (the agent).
package graph
