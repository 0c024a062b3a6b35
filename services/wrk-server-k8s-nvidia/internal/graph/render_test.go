package graph

import (
	"encoding/json"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	kubevirt "kubevirt.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/claim"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

const wantVMI = `
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata:
  name: a-1-n0
  labels: {app.kubernetes.io/managed-by: wrk-server-k8s-nvidia, cosmicac.dev/network: "00ff", cosmicac.dev/rack: us, cosmicac.dev/job: j-1,
    cosmicac.dev/project: x-7d0f6d1c6ac7a0e7ac1b4fc52a4ee5a5, cosmicac.dev/attempt: a-1, cosmicac.dev/replica: r-1, cosmicac.dev/node: "0"}
  annotations: {cosmicac.dev/job-name: "campaña"}
  ownerReferences: [{apiVersion: v1, kind: ConfigMap, name: a-1, uid: anchor}]
spec:
  evictionStrategy: External
  terminationGracePeriodSeconds: 60
  tolerations: [{key: gpu, operator: Exists}]
  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchFields: [{key: metadata.name, operator: In, values: [gpu-07]}]}]}}}
  domain:
    machine: {type: q35}
    firmware: {bootloader: {efi: {secureBoot: false}}}
    features: {acpi: {}, smm: {enabled: true}}
    cpu: {sockets: 1, cores: 32, threads: 1, model: host-passthrough}
    memory: {guest: 400Gi}
    resources: {requests: {memory: 400Gi, cpu: "32"}, limits: {memory: 400Gi, cpu: "32"}}
    devices:
      disableHotplug: true
      autoattachGraphicsDevice: false
      autoattachMemBalloon: false
      logSerialConsole: true
      networkInterfaceMultiqueue: true
      rng: {}
      disks:
      - {name: root, bootOrder: 1, disk: {bus: virtio}}
      - {name: seed, disk: {bus: virtio}}
      - {name: agent, serial: cosmicac-agent, disk: {bus: virtio, readonly: true}}
      interfaces: [{name: default, masquerade: {}}]
      gpus:
      - {name: gpu0, deviceName: nvidia.com/GH100_H100_SXM5_80GB}
      - {name: gpu1, deviceName: nvidia.com/GH100_H100_SXM5_80GB}
  networks: [{name: default, pod: {}}]
  volumes:
  - {name: root, dataVolume: {name: j-1-r0-n0-root}}
  - {name: seed, cloudInitNoCloud: {secretRef: {name: a-1-n0-seed}, networkDataSecretRef: {name: a-1-n0-seed}}}
  - {name: agent, containerDisk: {image: agents:1, imagePullPolicy: IfNotPresent}}
`

func record() *claim.Record {
	return &claim.Record{
		Version: 1, AttemptID: "a-1", JobID: "j-1", ReplicaID: "r-1", ProjectID: "Projekt Ä", JobName: "campaña", Model: "GH100_H100_SXM5_80GB",
		Image: "docker://i/u:1", DiskBytes: 20 << 30, Reach: []string{"192.0.2.7", "127.0.0.1", "2001:db8::7", "nonsense"},
		Nodes: []claim.RecordNode{{Node: "gpu-07", GPUs: 2, CPUCores: 32, MemoryBytes: 400 << 30}},
	}
}

func settings() *Settings {
	return &Settings{
		Rack: "us", Network: "00ff", AgentImage: "agents:1", SerialLog: true, DeniedCIDRs: []string{"10.96.0.0/12", "10.244.7.0/16", "fd00::/8", "0.0.0.0/0"},
		Tolerations: []corev1.Toleration{{Key: "gpu", Operator: corev1.TolerationOpExists}},
	}
}

// plain turns an object into what stands in a request.
func plain(t *testing.T, o any) map[string]any {
	t.Helper()
	raw, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	var m map[string]any
	if err := json.Unmarshal(raw, &m); err != nil {
		t.Fatal(err)
	}
	return m
}

func TestTheMachineIsWhatAPassthroughGuestNeeds(t *testing.T) {
	t.Parallel()
	got := plain(t, settings().VMI(record(), "anchor", 0))
	delete(got, "status")
	var want kubevirt.VirtualMachineInstance
	if err := yaml.UnmarshalStrict([]byte(strings.ReplaceAll(wantVMI, "x-7d0f6d1c6ac7a0e7ac1b4fc52a4ee5a5", label.Safe("Projekt Ä"))), &want); err != nil {
		t.Fatal(err)
	}
	wantPlain := plain(t, &want)
	delete(wantPlain, "status")
	a, _ := json.MarshalIndent(got, "", " ")
	b, _ := json.MarshalIndent(wantPlain, "", " ")
	if string(a) != string(b) {
		t.Fatalf("rendered:\n%s\nwant:\n%s", a, b)
	}
	rec := record()
	rec.Nodes[0].GPUs = 0
	if gpus := settings().VMI(rec, "anchor", 0).Spec.Domain.Devices.GPUs; gpus != nil {
		t.Errorf("GPUs of a machine without: %v", gpus)
	}
}

func TestTheRootDiskBelongsToTheJob(t *testing.T) {
	t.Parallel()
	s := settings()
	s.StorageClass, s.RegistrySecret, s.RegistryCA, s.PullMethod, s.VolumeMode = "fast", "reg", "ca", "node", "Block"
	dv := s.Disk(record(), 1)
	if dv.Name != "j-1-r0-n1-root" || len(dv.OwnerReferences) != 0 || dv.Labels[label.Attempt] != "" || dv.Labels[label.Job] != "j-1" {
		t.Fatalf("%+v", dv.ObjectMeta)
	}
	raw, err := json.Marshal(dv.Spec)
	want := `{"source":{"registry":{"url":"docker://i/u:1","pullMethod":"node","secretRef":"reg","certConfigMap":"ca"}},` +
		`"storage":{"accessModes":["ReadWriteOnce"],"resources":{"requests":{"storage":"20Gi"}},"storageClassName":"fast","volumeMode":"Block"}}`
	if err != nil || string(raw) != want {
		t.Fatalf("%s\nwant %s", raw, want)
	}
}

func TestAGuestReachesTheWorldAndNotTheCluster(t *testing.T) {
	t.Parallel()
	p := settings().Policy(record(), "anchor", []string{"10.244.9.0/24", "bad"})
	raw, err := json.Marshal(p.Spec)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"podSelector":{"matchLabels":{"cosmicac.dev/attempt":"a-1","cosmicac.dev/network":"00ff"}},"egress":[` +
		`{"to":[{"ipBlock":{"cidr":"0.0.0.0/0","except":["169.254.0.0/16","10.96.0.0/12","10.244.0.0/16","10.244.9.0/24"]}},` +
		`{"ipBlock":{"cidr":"::/0","except":["fe80::/10","fd00::/8"]}}]},` +
		`{"ports":[{"protocol":"UDP","port":53},{"protocol":"TCP","port":53}],"to":[{"podSelector":{"matchLabels":{"k8s-app":"kube-dns"}},` +
		`"namespaceSelector":{"matchLabels":{"kubernetes.io/metadata.name":"kube-system"}}}]},` +
		`{"to":[{"ipBlock":{"cidr":"192.0.2.7/32"}},{"ipBlock":{"cidr":"2001:db8::7/128"}}]}],"policyTypes":["Ingress","Egress"]}`
	if string(raw) != want {
		t.Fatalf("%s\nwant %s", raw, want)
	}
	gang := record()
	gang.Nodes = append(gang.Nodes, gang.Nodes[0])
	if p := settings().Policy(gang, "anchor", nil); len(p.Spec.Ingress) != 1 || p.Spec.Ingress[0].From[0].PodSelector.MatchLabels[label.Attempt] != "a-1" {
		t.Errorf("members of a gang: %+v", p.Spec.Ingress)
	}
}
