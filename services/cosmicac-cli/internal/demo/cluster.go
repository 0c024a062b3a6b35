package demo

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// kubeconfig is the little of a kubeconfig that the embedded cluster writes.
// A Kubernetes client library would weigh more than the whole CLI.
type kubeconfig struct {
	Clusters []struct {
		Cluster struct {
			Server string `yaml:"server"`
			CAFile string `yaml:"certificate-authority"`
			CAData string `yaml:"certificate-authority-data"`
		} `yaml:"cluster"`
	} `yaml:"clusters"`
	Users []struct {
		User struct {
			Token string `yaml:"token"`
		} `yaml:"user"`
	} `yaml:"users"`
}

// leftInCluster lists objects of ours that the cluster holds, as kind/name.
func (d *Demo) leftInCluster(ctx context.Context) ([]string, error) {
	raw, err := os.ReadFile(d.cluster.Kubeconfig)
	if err != nil {
		return nil, err
	}
	var k kubeconfig
	if err := yaml.Unmarshal(raw, &k); err != nil || len(k.Clusters) == 0 || len(k.Users) == 0 {
		return nil, fault.Wrap(fault.Internal, err, "the embedded cluster's kubeconfig cannot be read")
	}
	ca := []byte(nil)
	if c := k.Clusters[0].Cluster; c.CAData != "" {
		ca, err = base64.StdEncoding.DecodeString(c.CAData)
	} else {
		ca, err = os.ReadFile(c.CAFile)
	}
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}}
	defer transport.CloseIdleConnections()
	c := &http.Client{Timeout: 30 * time.Second, Transport: transport}
	namespace := "/namespaces/" + WorkerNamespace
	var left []string
	for _, resource := range []string{
		"/apis/kubevirt.io/v1" + namespace + "/virtualmachineinstances", "/apis/cdi.kubevirt.io/v1beta1" + namespace + "/datavolumes",
		"/api/v1" + namespace + "/persistentvolumeclaims", "/api/v1" + namespace + "/pods", "/api/v1" + namespace + "/secrets",
		"/api/v1" + namespace + "/configmaps", "/apis/networking.k8s.io/v1" + namespace + "/networkpolicies", "/api/v1/persistentvolumes",
		"/api/v1" + namespace + "/services", "/apis/k8s.cni.cncf.io/v1" + namespace + "/network-attachment-definitions",
	} {
		req, err := http.NewRequestWithContext(ctx, "GET", k.Clusters[0].Cluster.Server+resource, nil)
		if err != nil {
			return nil, err
		}
		req.Header.Set("Authorization", "Bearer "+k.Users[0].User.Token)
		res, err := c.Do(req)
		if err != nil {
			return nil, err
		}
		body, err := io.ReadAll(io.LimitReader(res.Body, 64<<20))
		res.Body.Close()
		if err != nil || res.StatusCode != http.StatusOK {
			return nil, fault.Wrap(fault.Unavailable, err, "list %s: %s", resource, res.Status)
		}
		var list struct {
			Items []struct {
				Metadata struct {
					Name   string            `json:"name"`
					Labels map[string]string `json:"labels"`
				} `json:"metadata"`
			} `json:"items"`
		}
		if err := json.Unmarshal(body, &list); err != nil {
			return nil, err
		}
		kind := resource[strings.LastIndex(resource, "/")+1:]
		for _, item := range list.Items {
			// What every namespace has, and what the operator put there.
			if kind == "configmaps" && item.Metadata.Name == "kube-root-ca.crt" {
				continue
			}
			if kind == "secrets" && !hasOurLabel(item.Metadata.Labels) {
				continue
			}
			left = append(left, kind+"/"+item.Metadata.Name)
		}
	}
	return left, nil
}

func hasOurLabel(labels map[string]string) bool {
	for k := range labels {
		if strings.HasPrefix(k, "cosmicac.dev/") {
			return true
		}
	}
	return false
}

// endMachines ends simulated machines that outlived the cluster process: they
// survive it by design, as VMs survive a control plane.
func (d *Demo) endMachines() {
	files, _ := filepath.Glob(filepath.Join(d.dir, "cluster", "data", "vms", "*", "pid*"))
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		fields := strings.Fields(string(raw))
		if len(fields) == 0 {
			continue
		}
		pid, err := strconv.Atoi(fields[0])
		if err != nil || pid <= 1 || !strings.Contains(commandLine(pid), filepath.Base(filepath.Dir(f))) {
			continue
		}
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

func commandLine(pid int) string {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return ""
	}
	return strings.ReplaceAll(string(raw), "\x00", " ")
}
