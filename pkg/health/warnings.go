package health

// The codes. Add only at the end; a code is never renamed or reused.
const (
	// RosterExpiresSoon: Raise(code, expiry, time left).
	RosterExpiresSoon Code = "roster_expires_soon"
	// RosterExpired: Raise(code, expiry).
	RosterExpired Code = "roster_expired"
	// NoBootstrapReachable: Raise(code, number of bootstraps, last error).
	NoBootstrapReachable Code = "no_bootstrap_reachable"
	// ClockSkew: RaiseFor(code, peer, peer's name, difference).
	ClockSkew Code = "clock_skew"
	// ClusterUnreachable: Raise(code, API server, error).
	ClusterUnreachable Code = "cluster_unreachable"
	// CredentialsRefused: Raise(code, what refused, error).
	CredentialsRefused Code = "credentials_refused"
	// OrkUnreachable: Raise(code, error).
	OrkUnreachable Code = "ork_unreachable"
	// AppNodeUnreachable: Raise(code, error).
	AppNodeUnreachable Code = "app_node_unreachable"
	// StorageFailing: Raise(code, what was tried, error).
	StorageFailing Code = "storage_failing"
	// StoreDiskLow: Raise(code, folder, bytes free).
	StoreDiskLow Code = "store_disk_low"
	// RackNotRegistered: RaiseFor(code, rack, rack id, this worker's key).
	RackNotRegistered Code = "rack_not_registered"
	// DuplicateKey: RaiseFor(code, key, key, the two places).
	DuplicateKey Code = "duplicate_key"
	// EngineNotReady: Raise(code, engine, why).
	EngineNotReady Code = "engine_not_ready"
	// NotInRoster: Raise(code, this node's key).
	NotInRoster Code = "not_in_roster"
	// NoNetworkKey: Raise(code).
	NoNetworkKey Code = "no_network_key"
	// ManyUnreachable: Raise(code, how many of how many).
	ManyUnreachable Code = "many_unreachable"
	// PreflightFailed: RaiseFor(code, subject, what is missing, what to do).
	PreflightFailed Code = "preflight_failed"
	// CleanupPending: Raise(code, how many, the oldest).
	CleanupPending Code = "cleanup_pending"
	// Simulated: Raise(code, what).
	Simulated Code = "simulated"
	// ProxyWithoutKeys: Raise(code, error).
	ProxyWithoutKeys Code = "proxy_without_keys"
	// ScrapeFailing: RaiseFor(code, daemon, daemon, error).
	ScrapeFailing Code = "scrape_failing"
	// Undeclared: a defect, a code outside this list was raised.
	Undeclared Code = "undeclared"
	// CertificateNotRenewed: Raise(code, until when it is good, error).
	CertificateNotRenewed Code = "certificate_not_renewed"
	// RelayedOnly: RaiseFor(code, peer, peer's name, peer's name).
	RelayedOnly Code = "relayed_only"
	// UDPBlocked: Raise(code, this node's name).
	UDPBlocked Code = "udp_blocked"
	// PeersRefused: Raise(code, how many, the last one's key, reason).
	PeersRefused Code = "peers_refused"
	// RefusedByPeer: RaiseFor(code, peer, peer's name, reason).
	RefusedByPeer Code = "refused_by_peer"
	// StoodStill: Raise(code, for how long).
	StoodStill Code = "stood_still"
	// AbandonedWork: RaiseFor(code, rack, rack, when it was removed, how many, which, rack).
	AbandonedWork Code = "abandoned_work"
	// UnrecordedWork: RaiseFor(code, rack, rack, how many jobs, the first, rack).
	UnrecordedWork Code = "unrecorded_work"
	// RackFailing: RaiseFor(code, rack, rack, how many nodes and why).
	RackFailing Code = "rack_failing"
)

var declared = []Warning{
	{RosterExpiresSoon, Warn, "the roster expires at %s, in %s", "sign a new one with a root key: `cosmicac network renew`, with --request FILE where the root key is offline"},
	{RosterExpired, Error, "the roster expired at %s: members are refused", "sign a new one now with a root key: `cosmicac network renew`, with --request FILE where the root key is offline"},
	{NoBootstrapReachable, Error, "none of %s bootstraps can be reached: %s", "see that a mesh-bootstrap runs and that its mesh port is open to this host in TCP and UDP"},
	{ClockSkew, Warn, "the clock of %s differs from this one by %s", "run a time service (chrony, systemd-timesyncd) on both hosts; over 15 minutes signed records are refused"},
	{ClusterUnreachable, Error, "the Kubernetes API at %s does not answer: %s", "see that the API server runs and that this host reaches it; running jobs go on meanwhile"},
	{CredentialsRefused, Error, "%s refuses this daemon's credentials: %s", "renew the kubeconfig or token named in the configuration; it is read again by itself"},
	{OrkUnreachable, Error, "wrk-ork cannot be reached: %s", "see that wrk-ork runs: `systemctl status cosmicac-wrk-ork`; what runs goes on meanwhile"},
	{AppNodeUnreachable, Warn, "app-node cannot be reached: %s", "see that app-node runs: `systemctl status cosmicac-app-node`"},
	{StorageFailing, Error, "%s failed: %s", "see that the disk is mounted, writable and not full"},
	{StoreDiskLow, Warn, "the disk of %s has %s left", "free space or enlarge the disk"},
	{RackNotRegistered, Error, "rack %s is not registered, or with another key", "an administrator registers it with this worker's key: `cosmicac racks put` and key %s"},
	{DuplicateKey, Error, "key %s is in use in two places: %s", "stop one of the two daemons; each needs a state folder of its own, a copied one must have its key removed"},
	{EngineNotReady, Warn, "engine %s is not ready: %s", "see the job's log: `cosmicac jobs logs`"},
	{NotInRoster, Error, "this node's key %s is not in the roster", "admit it: `cosmicac network admit` with that key"},
	{NoNetworkKey, Warn, "no network key is held here, so peers cannot be found by role", "it comes by itself from the first member that is reached; see that a bootstrap is reachable"},
	{ManyUnreachable, Error, "%s look unreachable at once: this host's own network is suspected and nothing is replaced", "check this host's network"},
	{PreflightFailed, Error, "the cluster lacks something: %s", "%s"},
	{CleanupPending, Warn, "%s attempts wait for the cluster to remove their objects, the oldest: %s", "look at the objects named; a finalizer or a lost node usually holds them"},
	{Simulated, Info, "%s is simulated", "nothing to do in a demo; never use it in production"},
	{ProxyWithoutKeys, Error, "the proxy holds no API keys yet: %s", "see that app-node runs and is reachable"},
	{ScrapeFailing, Warn, "metrics of %s cannot be read: %s", "see that the daemon runs"},
	{Undeclared, Error, "warning %s was raised that is not in the list of pkg/health", "report this as a defect"},
	{CertificateNotRenewed, Warn, "the job certificate, good until %s, could not be renewed: %s", "see that wrk-ork runs and that this VM reaches it; it is tried again by itself, and shells go on meanwhile"},
	{RelayedOnly, Warn, "%s is reached through a relay only, which is slower", "open the mesh port of one of the two hosts to the other, in TCP and UDP; `cosmicac mesh trace %s` tells what was tried"},
	{UDPBlocked, Warn, "TCP gets through to the bootstraps and QUIC does not: UDP is blocked on the way", "let UDP out of this host to the bootstraps' mesh ports and its answers in; without it no hole is punched through a NAT; `cosmicac mesh netcheck --from %s` tells more"},
	{PeersRefused, Warn, "%s introductions were refused lately, the last of key %s: %s", "admit the key if it is yours: `cosmicac network admit`; if not, the log says where it comes from"},
	{StoodStill, Warn, "this daemon stood still for %s: nothing is judged by what it did not hear meanwhile", "look for what stopped the host or the process: sleep, swapping, a debugger"},
	{AbandonedWork, Error, "rack %s was removed by force at %s and is back with %s attempts that were abandoned: %s", "decide about them: `cosmicac racks adopt %s`, or `cosmicac racks clear` with --confirm"},
	{UnrecordedWork, Error, "rack %s holds something of %s jobs that wrk-ork has no record of, as of %s: an older copy of its record, or another orchestrator; it is left alone", "bring back the newer record, or take it down: `cosmicac doctor leaks` lists it, `cosmicac racks clear %s` with --confirm removes it"},
	{RackFailing, Error, "rack %s fails as a whole, so no more of its nodes are quarantined: %s", "look for the one cause in its cluster; `cosmicac racks quarantine list` has the evidence; cordon the rack if it takes long"},
	{RefusedByPeer, Error, "%s refuses this node: %s", "see that both hold the newest roster and that it lists this node's key: `cosmicac network roster`, `cosmicac doctor`"},
}

var byCode = func() map[Code]Warning {
	m := make(map[Code]Warning, len(declared))
	for _, w := range declared {
		m[w.Code] = w
	}
	return m
}()

// Declared lists every warning in the order of declaration.
func Declared() []Warning { return append([]Warning(nil), declared...) }
