// Made from proto/cosmicac/ork/v1 by `make generate`; not edited by hand.

/** What people read of a state, a reason or a condition. */
export interface Words { label: string; means: string; remedy: string }

export const states: Record<string, Words> = {
  queued: { label: "queued", means: "no plan yet; the reason says for what it waits", remedy: "a plan, or a stop" },
  reserving: { label: "reserving", means: "a plan was made; the rack's worker has not claimed it yet", remedy: "the worker's claim, or its refusal (back to queued)" },
  provisioning: { label: "provisioning", means: "claimed: disk, scheduling, boot, then waiting for the agent", remedy: "the agent redeems its join token" },
  starting: { label: "starting", means: "the agent said hello; checks, or the engine loads", remedy: "the agent says ready" },
  running: { label: "running", means: "ready once; agent_ready says whether it is now", remedy: "an end, or a stop" },
  stopping: { label: "stopping", means: "asked to end; its GPUs are still held", remedy: "the cluster holds nothing of it" },
  stopped: { label: "stopped", means: "ended as asked; its root disk stays, its GPUs are given up", remedy: "start makes a new attempt" },
  succeeded: { label: "succeeded", means: "the guest shut itself down cleanly", remedy: "start" },
  failed: { label: "failed", means: "the reason says why", remedy: "start; what failed to start on a node, and inference replicas, are tried again by themselves with pauses and a bound" },
  cancelled: { label: "cancelled", means: "ended by a delete", remedy: "the record goes when the disks are gone too" },
};

export const reasons: Record<string, Words> = {
  unknown_model: { label: "unknown GPU model", means: "no rack in this location offers this GPU model and may", remedy: "another model or location, or a rack that has it" },
  never_fits: { label: "never fits", means: "no node could ever hold it, judged by nodes' totals", remedy: "fewer GPUs, cores or memory, or a larger node" },
  busy: { label: "busy", means: "it fits, but not now; the message says what is free where", remedy: "nothing: it starts when others end" },
  over_quota: { label: "over quota", means: "the project holds as many GPUs as it may", remedy: "end other jobs of the project, or a higher quota" },
  cordoned: { label: "cordoned", means: "an operator has closed the rack or the node to new work", remedy: "an operator opens it again" },
  quarantined: { label: "quarantined", means: "work failed to start again and again where it would fit", remedy: "an operator looks at the evidence and lifts it: cosmicac racks quarantine list" },
  no_fabric: { label: "no fabric", means: "a replica over several nodes needs InfiniBand adapters and the overlay, and the rack lacks one or both", remedy: "fewer GPUs than a node has, or a rack with a fabric" },
  unknown_location: { label: "unknown location", means: "no rack is in this location", remedy: "another location, or a rack there" },
  rack_unreachable: { label: "rack unreachable", means: "the rack's worker cannot be reached; nothing is assumed of the job", remedy: "the worker reports again" },
  claim_refused: { label: "claim refused", means: "the worker refused the plan; its words are in the message", remedy: "nothing: another plan is made after a pause" },
  importing_image: { label: "importing the image", means: "the root disk is being filled from the image", remedy: "nothing: it goes on by itself" },
  image_unavailable: { label: "image unavailable", means: "the image cannot be pulled or used; the registry's words are in the message", remedy: "another image, or credentials for the registry" },
  scheduling: { label: "scheduling", means: "the cluster looks for the place of the VM", remedy: "nothing: it goes on by itself" },
  booting: { label: "booting", means: "the VM is being started", remedy: "nothing: it goes on by itself" },
  waiting_for_agent: { label: "waiting for the agent", means: "the VM runs; the agent in it has not called yet", remedy: "nothing: it goes on by itself" },
  agent_timeout: { label: "agent timeout", means: "the VM ran and its agent did not call, or was not ready, in time", remedy: "an image with cloud-init, or a way from the VM to the network" },
  checking_gpus: { label: "checking GPUs", means: "the agent waits for its GPUs and their driver", remedy: "nothing: it goes on by itself" },
  loading_model: { label: "loading the model", means: "the engine downloads and loads the model", remedy: "nothing: it goes on by itself" },
  engine_failed: { label: "engine failed", means: "the engine or the agent said that it failed; its words are in the message", remedy: "other engine arguments, or another model; see cosmicac jobs logs" },
  stop_requested: { label: "stop requested", means: "somebody stopped the job", remedy: "start it again" },
  delete_requested: { label: "delete requested", means: "somebody deleted the job", remedy: "nothing" },
  guest_shutdown: { label: "guest shut down", means: "the VM shut itself down", remedy: "start it again" },
  vm_failed: { label: "VM failed", means: "the VM ended by itself, or could not be started; the cluster's words are in the message", remedy: "start it again; an operator looks at the node" },
  deadline: { label: "deadline passed", means: "a step in the cluster took too long; the message says which", remedy: "an operator looks at the object named" },
  cluster_refused: { label: "cluster refused", means: "the cluster itself refuses the objects of the job", remedy: "an operator corrects what the message names: cosmicac rack check" },
  node_lost: { label: "node lost", means: "the cluster says that the VM was lost with its node", remedy: "start it again" },
  drained: { label: "drained", means: "its node or its rack was drained and the time for that is over", remedy: "start it again once the rack is open" },
  fenced: { label: "fenced", means: "a second key redeemed the join token; neither of the two is believed", remedy: "delete the job and look for who read its seed" },
  max_duration: { label: "maximum duration", means: "it ran for as long as it may", remedy: "start it again, for as long again" },
  cost_limit: { label: "cost limit", means: "its GPUs have cost as much as they may", remedy: "a new job with a higher cost limit" },
  idle: { label: "idle", means: "no GPU use and no shell for as long as it may", remedy: "start it again" },
  rack_forgotten: { label: "rack forgotten", means: "the rack that holds its root disk, or held its GPUs, was removed", remedy: "the rack comes back, or another job" },
  quota_unknown: { label: "quota unknown", means: "the orchestrator was not told the project's quota, or cannot read it", remedy: "app-node reaches the orchestrator" },
  fabric_count: { label: "GPU count of the board", means: "an NVSwitch board gives a VM one GPU or all; no rack knows its partitions", remedy: "1 GPU, all of a board, or a rack whose board counts are set" },
  fenced_by_operator: { label: "fenced by an operator", means: "an operator gave up an attempt on a silent node and said that it may be replaced", remedy: "nothing: a new attempt is placed elsewhere" },
  restart_requested: { label: "restart requested", means: "somebody restarted the job", remedy: "nothing: a new attempt follows" },
  vm_removed: { label: "VM removed", means: "somebody else removed or replaced its VM in the cluster", remedy: "start it again" },
  volume_not_ready: { label: "volume not ready", means: "a volume that is attached to it cannot be used yet; the message says which and why", remedy: "nothing while it is being made; else detach it, or an operator looks at it" },
  updated: { label: "updated", means: "its job was given another specification, and a replica of that one takes its place", remedy: "nothing: the update goes on by itself" },
  replicas_reduced: { label: "fewer replicas", means: "its job was given fewer replicas", remedy: "nothing; or more replicas: cosmicac jobs update" },
};

export const conditions: Record<string, Words> = {
  unreachable: { label: "unreachable", means: "its worker, node or agent is not heard of; nothing is assumed", remedy: "wait; only an operator who knows that the node is off may fence the attempt" },
  degraded: { label: "degraded", means: "fewer replicas run than were asked for", remedy: "nothing: the others are on their way, or their reasons say why not" },
  cleanup_pending: { label: "cleaning up", means: "the cluster still holds something of what has ended", remedy: "look at the object named; a finalizer or a lost node usually holds it" },
  draining: { label: "draining", means: "its node or rack is being drained, or it finishes what it has", remedy: "save your work before the time given" },
  idle: { label: "idle", means: "no GPU use and no shell; it is stopped at the time given", remedy: "use it, or let it be stopped" },
  alert: { label: "alert", means: "something the job was told to watch has come to pass", remedy: "the message says what" },
  abandoned: { label: "abandoned", means: "an operator removed its rack by force; it may still run there", remedy: "an operator brings the rack back and adopts or deletes it" },
  disk_lost: { label: "root disk lost", means: "somebody else deleted its root disk in the cluster; what is on it goes with the VM", remedy: "copy what you need while it runs; the next start begins with a new disk" },
  updating: { label: "updating", means: "its replicas are replaced, one after the other, by ones of its newest specification", remedy: "nothing: it goes on by itself; the message says for what it waits" },
  update_stopped: { label: "update stopped", means: "a replica of the newest specification did not come up; those of the one before go on serving", remedy: "another update: cosmicac jobs update, with other arguments or with those of before" },
};

export const volumeStates: Record<string, Words> = {
  creating: { label: "creating", means: "recorded; the rack's cluster has not said that it can be used", remedy: "nothing: it goes on by itself once the rack's worker is reached" },
  ready: { label: "ready", means: "a job can use it", remedy: "a delete" },
  failed: { label: "failed", means: "the rack's cluster does not take it; its words are in the message", remedy: "delete it and create another, of another class or size" },
  lost: { label: "lost", means: "it was ready, and somebody else removed it from the cluster: what was on it is gone", remedy: "delete it; it is never made anew under its name by itself" },
  deleting: { label: "deleting", means: "a delete was asked for; the cluster still holds it, or cannot be asked", remedy: "the rack's worker says that nothing of it is left" },
};
