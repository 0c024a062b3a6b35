package api

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// route is one row of the table.
type route struct {
	method, path string
	id           string
	right        Right
	// audit names the action in the audit log; empty for what changes nothing.
	audit   string
	status  int
	tag     string
	summary string
}

const (
	auditKey  = "audit"
	streamKey = "stream"
)

// routes is the table of everything the API does and the right that each needs.
func (s *Server) routes() {
	add(s, route{"GET", "/openapi.json", "get-openapi", Public, "", 200, "Meta", "This document"}, s.openAPI)

	add(s, route{"POST", "/login", "login", Public, "login", 200, "People", "Sign in with email and password"}, s.login)
	add(s, route{"POST", "/logout", "logout", Authenticated, "logout", 204, "People", "End this sign-in"}, s.logout)
	add(s, route{"POST", "/me/logout-everywhere", "logout-everywhere", Authenticated, "logout.everywhere", 204, "People", "End all my sign-ins and close my shells"}, s.logoutEverywhere)
	add(s, route{"GET", "/me", "get-me", Authenticated, "", 200, "People", "Who I am"}, s.me)
	add(s, route{"POST", "/me/password", "change-my-password", Authenticated, "password.change", 204, "People", "Change my password, end all my sign-ins and close my shells"}, s.changePassword)
	add(s, route{"GET", "/users", "list-users", Admin, "", 200, "People", "List users"}, s.listUsers)
	add(s, route{"POST", "/users", "create-user", Admin, "user.create", 201, "People", "Make a user"}, s.createUser)
	add(s, route{"PATCH", "/users/{id}", "change-user", Admin, "user.change", 200, "People", "Change a user's password, power or access"}, s.changeUser)
	add(s, route{"POST", "/users/{id}/logout", "logout-user", Admin, "user.logout", 204, "People", "End all sign-ins of a user and close their shells"}, s.logoutUser)
	add(s, route{"DELETE", "/users/{id}", "delete-user", Admin, "user.delete", 204, "People", "Remove a user who has no jobs"}, s.deleteUser)
	add(s, route{"GET", "/projects", "list-projects", JobsRead, "", 200, "People", "List my projects, or all for administrators, with their quota and use"}, s.listProjects)
	add(s, route{"GET", "/projects/{id}/quota", "get-quota", JobsRead, "", 200, "People", "How many GPUs a project may hold at once, and how much of volumes"}, s.getQuota)
	add(s, route{"PUT", "/projects/{id}/quota", "set-quota", Admin, "quota.set", 200, "People", "Set how many GPUs a project may hold at once, and how much of volumes"}, s.setQuota)
	add(s, route{"GET", "/audit", "list-audit", Admin, "", 200, "People", "Who did what, newest first"}, s.listAudit)

	add(s, route{"POST", "/jobs", "create-job", JobsWrite, "job.create", 201, "Jobs", "Make a job"}, s.createJob)
	add(s, route{"POST", "/jobs/plan", "plan-job", JobsWrite, "", 200, "Jobs", "Say where a job would run now, or every reason why not; records nothing"}, s.planJob)
	add(s, route{"GET", "/jobs", "list-jobs", JobsRead, "", 200, "Jobs", "List jobs, newest first"}, s.listJobs)
	add(s, route{"GET", "/jobs/{id}", "get-job", JobsRead, "", 200, "Jobs", "Read a job"}, s.getJob)
	add(s, route{"POST", "/jobs/{id}/stop", "stop-job", JobsWrite, "job.stop", 200, "Jobs", "Stop a job, keep its disks"}, s.stopJob)
	add(s, route{"POST", "/jobs/{id}/start", "start-job", JobsWrite, "job.start", 200, "Jobs", "Start a stopped job again"}, s.startJob)
	add(s, route{"POST", "/jobs/{id}/restart", "restart-job", JobsWrite, "job.restart", 200, "Jobs", "End a job's attempts and have others follow"}, s.restartJob)
	add(s, route{"POST", "/jobs/{id}/update", "update-job", JobsWrite, "job.update", 200, "Jobs", "Change a running Managed Inference Job, replica by replica"}, s.updateJob)
	add(s, route{"POST", "/attempts/{id}/fence", "fence-attempt", Admin, "attempt.fence", 200, "Jobs", "Give up an attempt on a silent node, so that another may follow"}, s.fenceAttempt)
	add(s, route{"DELETE", "/jobs/{id}", "delete-job", JobsWrite, "job.delete", 202, "Jobs", "Stop a job and remove its disks"}, s.deleteJob)
	add(s, route{"GET", "/jobs/{id}/events", "stream-job", JobsRead, "", 200, "Jobs", "Follow a job as server-sent events"}, s.streamJob)
	add(s, route{"GET", "/jobs/{id}/history", "list-job-history", JobsRead, "", 200, "Jobs", "A job's transitions, oldest first"}, s.jobHistory)
	add(s, route{"POST", "/jobs/{id}/grants", "create-grant", JobsWrite, "grant.create", 201, "Jobs", "Get a signed grant to reach a job's agent"}, s.createGrant)

	add(s, route{"GET", "/jobs/{id}/gateway", "get-gateway", JobsRead, "", 200, "Jobs", "Read the WireGuard gateway of a job's VM, with each peer's last handshake"}, s.getGateway)
	add(s, route{"POST", "/jobs/{id}/gateway", "create-gateway", JobsWrite, "gateway.create", 200, "Jobs", "Open a WireGuard gateway in a running job's VM, on a UDP port that the job declared"}, s.openGateway)
	add(s, route{"DELETE", "/jobs/{id}/gateway", "delete-gateway", JobsWrite, "gateway.delete", 204, "Jobs", "Cut every peer, forget them and the gateway's key"}, s.closeGateway)
	add(s, route{"POST", "/jobs/{id}/gateway/peers", "add-gateway-peer", JobsWrite, "gateway.peer.add", 200, "Jobs", "Let a WireGuard public key in"}, s.addGatewayPeer)
	add(s, route{"DELETE", "/jobs/{id}/gateway/peers/{name}", "remove-gateway-peer", JobsWrite, "gateway.peer.remove", 200, "Jobs", "Cut a peer, at once and for good"}, s.removeGatewayPeer)

	add(s, route{"POST", "/volumes", "create-volume", VolumesWrite, "volume.create", 201, "Volumes", "Make a volume: a disk in one rack that outlives jobs"}, s.createVolume)
	add(s, route{"GET", "/volumes", "list-volumes", VolumesRead, "", 200, "Volumes", "List volumes, oldest first"}, s.listVolumes)
	add(s, route{"GET", "/volumes/{id}", "get-volume", VolumesRead, "", 200, "Volumes", "Read a volume"}, s.getVolume)
	add(s, route{"POST", "/volumes/{id}/attach", "attach-volume", VolumesWrite, "volume.attach", 200, "Volumes", "Give a stopped job a volume from its next start on"}, s.attachVolume)
	add(s, route{"POST", "/volumes/{id}/detach", "detach-volume", VolumesWrite, "volume.detach", 200, "Volumes", "Take a volume from a stopped job"}, s.detachVolume)
	add(s, route{"DELETE", "/volumes/{id}", "delete-volume", VolumesWrite, "volume.delete", 202, "Volumes", "Remove a volume with all that is on it; refused while a job has it"}, s.deleteVolume)

	add(s, route{"GET", "/racks", "list-racks", Authenticated, "", 200, "Capacity", "List racks with nodes and GPUs"}, s.listRacks)
	add(s, route{"PUT", "/racks/{id}", "put-rack", Admin, "rack.put", 200, "Capacity", "Make or change a rack's entry"}, s.putRack)
	add(s, route{"POST", "/racks/{id}/cordon", "cordon-rack", Admin, "rack.cordon", 200, "Capacity", "Stop or resume new work on a rack"}, s.cordonRack)
	add(s, route{"POST", "/racks/{id}/drain", "drain-rack", Admin, "rack.drain", 200, "Capacity", "Close a rack, tell its jobs' owners, and stop what runs at a deadline"}, s.drainRack)
	add(s, route{"DELETE", "/racks/{id}", "forget-rack", Admin, "rack.forget", 200, "Capacity", "Remove a rack's entry"}, s.forgetRack)
	add(s, route{"GET", "/forgotten-racks", "list-forgotten-racks", Admin, "", 200, "Capacity", "Racks that were removed by force, with what was left there"}, s.listForgottenRacks)
	add(s, route{"POST", "/forgotten-racks/{id}", "resolve-abandoned", Admin, "rack.abandoned", 200, "Capacity", "Adopt or delete what a forced removal left on a rack that is back"}, s.resolveAbandoned)
	add(s, route{"GET", "/quarantines", "list-quarantines", Admin, "", 200, "Capacity", "What is left out of placement or suspect, with the evidence"}, s.listQuarantines)
	add(s, route{"POST", "/quarantines", "set-quarantine", Admin, "quarantine.set", 204, "Capacity", "Leave a node, or one GPU model of it, out of placement"}, s.setQuarantine)
	add(s, route{"POST", "/quarantines/lift", "lift-quarantine", Admin, "quarantine.lift", 204, "Capacity", "Open it again and forget its failures"}, s.liftQuarantine)
	add(s, route{"GET", "/nodes", "list-nodes", Authenticated, "", 200, "Capacity", "List nodes of every rack"}, s.listNodes)
	add(s, route{"GET", "/gpus", "list-gpus", Authenticated, "", 200, "Capacity", "What one could get now, by model and location, and who waits"}, s.listGPUs)
	add(s, route{"GET", "/locations", "list-locations", Authenticated, "", 200, "Capacity", "Locations that have a rack"}, s.listLocations)

	add(s, route{"POST", "/api-keys", "create-api-key", KeysWrite, "api_key.create", 201, "API keys", "Make a key; it is shown once"}, s.createKey)
	add(s, route{"GET", "/api-keys", "list-api-keys", KeysRead, "", 200, "API keys", "List my keys"}, s.listKeys)
	add(s, route{"GET", "/api-keys/usage", "get-api-key-usage", KeysRead, "", 200, "API keys", "What my keys used"}, s.keyUsage)
	add(s, route{"GET", "/api-keys/{id}", "get-api-key", KeysRead, "", 200, "API keys", "Read a key's record"}, s.getKey)
	add(s, route{"PATCH", "/api-keys/{id}", "rename-api-key", KeysWrite, "api_key.rename", 200, "API keys", "Rename an active key"}, s.renameKey)
	add(s, route{"POST", "/api-keys/{id}/revoke", "revoke-api-key", KeysWrite, "api_key.revoke", 200, "API keys", "End a key for good; its usage stays"}, s.revokeKey)

	add(s, route{"GET", "/models", "list-models", Authenticated, "", 200, "Catalogue", "Models that a job can serve"}, s.listModels)
	add(s, route{"GET", "/images", "list-images", Authenticated, "", 200, "Catalogue", "Base images that a job can name"}, s.listImages)

	add(s, route{"GET", "/network", "get-network", Authenticated, "", 200, "Network", "Signed records that a peer needs to join"}, s.getNetwork)
	add(s, route{"GET", "/health", "get-health", Authenticated, "", 200, "Network", "Warnings of every daemon"}, s.health)
	add(s, route{"GET", "/mesh", "get-mesh", Admin, "", 200, "Network", "Every daemon and the links between them"}, s.mesh)
}

// add puts one row into the table. A handler's error becomes a problem here.
func add[I, O any](s *Server, r route, handle func(context.Context, *I) (*O, error)) {
	op := huma.Operation{
		OperationID:   r.id,
		Method:        r.method,
		Path:          r.path,
		Summary:       r.summary,
		Tags:          []string{r.tag},
		DefaultStatus: r.status,
		MaxBodyBytes:  MaximumBodyBytes,
		Extensions:    map[string]any{Extension: r.right},
		Metadata:      map[string]any{auditKey: r.audit, streamKey: r.id == "stream-job"},
		Errors:        []int{http.StatusBadRequest},
	}
	if r.right != Public {
		op.Security = []map[string][]string{{"token": {}}}
		op.Errors = append(op.Errors, http.StatusUnauthorized, http.StatusForbidden)
	}
	huma.Register(s.api, op, func(ctx context.Context, input *I) (*O, error) {
		out, err := handle(ctx, input)
		if err == nil {
			return out, nil
		}
		p := problemOf(err)
		if p.Kind == string(fault.Internal) {
			s.Log.Error("an operation failed", "operation", r.id, "error", err)
		}
		note(ctx, p)
		return nil, p
	})
}

func streams(op *huma.Operation) bool {
	is, _ := op.Metadata[streamKey].(bool)
	return is
}

type documentOutput struct {
	ContentType string `header:"Content-Type"`
	Body        []byte
}

func (s *Server) openAPI(context.Context, *struct{}) (*documentOutput, error) {
	body, err := s.api.OpenAPI().MarshalJSON()
	return &documentOutput{ContentType: "application/openapi+json", Body: body}, err
}

type nothing struct{}
