package config

import (
	"bytes"
	"strings"
	"testing"
)

func TestParseUpNamesTheFlagAndTheRule(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		args []string
		want []string
	}{
		{nil, []string{"--dir is required"}},
		{[]string{"--dir", dir, "--port", "-1"}, []string{"--port", "from 0 to 65535"}},
		{[]string{"--dir", dir, "--port", "x"}, []string{"--port"}},
		{[]string{"--dir", dir, "--pool", "name=us"}, []string{"--pool", "resource is required"}},
		{[]string{"--dir", dir, "--pool", "us"}, []string{"--pool", "key=value"}},
		{[]string{"--dir", dir, "--pool", "name=us,nodes=0,resource=nvidia.com/AD104GL_L4"}, []string{"--pool", "nodes must be"}},
		{[]string{"--dir", dir, "--pool", "name=us,nodes=-3,resource=nvidia.com/AD104GL_L4"}, []string{"--pool", "nodes must be"}},
		{[]string{"--dir", dir, "--pool", "name=us,gpus=999999999,resource=nvidia.com/AD104GL_L4"}, []string{"--pool", "gpus must be"}},
		{[]string{"--dir", dir, "--pool", "name=us,gpus=99999999999999999999,resource=nvidia.com/AD104GL_L4"}, []string{"gpus must be"}},
		{[]string{"--dir", dir, "--pool", "name=us,memory=-1,resource=nvidia.com/AD104GL_L4"}, []string{"--pool", "memory must be"}},
		{[]string{"--dir", dir, "--pool", "name=US,resource=nvidia.com/AD104GL_L4"}, []string{"--pool", "lower-case"}},
		{[]string{"--dir", dir, "--pool", "name=us,resource=nvidia.com/UNHEARD_OF"}, []string{"--pool", "pci is required"}},
		{[]string{"--dir", dir, "--pool", "name=a,resource=nvidia.com/AD104GL_L4", "--pool", "name=a,resource=nvidia.com/AD104GL_L4"}, []string{"--pool", "two pools"}},
		{[]string{"--dir", dir, "--pool", "name=a,nodes=600,resource=nvidia.com/AD104GL_L4", "--pool", "name=b,nodes=600,resource=nvidia.com/AD104GL_L4"}, []string{"--pool", "1000"}},
		{[]string{"--dir", dir, "--agent-dir", "/no/such/folder"}, []string{"--agent-dir", "existing folder"}},
		{[]string{"--dir", dir, "--kubeconfig-for", "ns=file"}, []string{"--kubeconfig-for", "NAMESPACE/SERVICEACCOUNT=FILE"}},
		{[]string{"--dir", dir, "--boot-time", "-1s"}, []string{"--boot-time"}},
		{[]string{"--dir", dir, "--nonsense"}, []string{"unknown flag --nonsense"}},
		{[]string{"--dir", dir, "extra"}, []string{"extra"}},
	} {
		_, err := ParseUp(c.args, &bytes.Buffer{})
		if err == nil {
			t.Errorf("%q was accepted", c.args)
			continue
		}
		for _, w := range c.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%q: %q does not say %q", c.args, err, w)
			}
		}
	}
}

func TestParseUpDefaults(t *testing.T) {
	o, err := ParseUp([]string{"--dir", t.TempDir()}, &bytes.Buffer{})
	if err != nil {
		t.Fatal(err)
	}
	if len(o.Pools) != 2 || o.Pools[0].Nodes*o.Pools[0].GPUs != 32 || o.Pools[1].Nodes*o.Pools[1].GPUs != 8 {
		t.Fatalf("default pools are %+v", o.Pools)
	}
}

func TestParsePoolTakesAnyDevice(t *testing.T) {
	p, err := ParsePool("name=lab,nodes=3,gpus=2,resource=nvidia.com/XYZ,pci=10de:abcd,cpus=32,memory=128Gi")
	if err != nil {
		t.Fatal(err)
	}
	if p.Nodes != 3 || p.GPUs != 2 || p.PCI != "10DE:ABCD" || p.CPUs != 32 || p.Memory.String() != "128Gi" {
		t.Fatalf("got %+v", p)
	}
}

func TestAPoolMayHaveADeviceAndABridgeForReplicasOverSeveralNodes(t *testing.T) {
	const base = "name=lab,nodes=2,gpus=8,resource=nvidia.com/GH100_H100_SXM5_80GB"
	p, err := ParsePool(base + ",hostdev=nvidia.com/mlnx_cx7,hostdevs=8,bridge=br-cosmicac")
	if err != nil || p.HostDevice != "nvidia.com/mlnx_cx7" || p.HostDevices != 8 || p.Bridge != "br-cosmicac" {
		t.Fatalf("got %+v, %v", p, err)
	}
	for _, bad := range []string{",bridge=Br0", ",bridge=a-bridge-of-a-name-too-long", ",hostdev=x/y", ",hostdevs=2"} {
		if _, err := ParsePool(base + bad); err == nil {
			t.Errorf("%s was taken", bad)
		}
	}
}
