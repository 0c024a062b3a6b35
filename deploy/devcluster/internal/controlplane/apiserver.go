package controlplane

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/spf13/pflag"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"
)

// startAPIServer runs kube-apiserver and returns when /readyz is fine. It does not use the command's own constructor,
// which would install signal handlers.
func (c *ControlPlane) startAPIServer(ctx context.Context, listener net.Listener, etcdURL, certDir string) error {
	// Informer names are process-wide since 1.37; ours is released after the run so that a second start could follow.
	name, err := cache.NewInformerName("kube-apiserver")
	if err != nil {
		return fmt.Errorf("start the api server: %w", err)
	}
	port := listener.Addr().(*net.TCPAddr).Port
	s := options.NewServerRunOptions()
	s.InformerName = name
	s.SecureServing.Listener, s.SecureServing.BindPort = listener, port
	s.SecureServing.BindAddress = net.IPv4(127, 0, 0, 1)
	s.SecureServing.ServerCert.CertDirectory = certDir // makes a certificate that is its own CA

	flags := pflag.NewFlagSet("kube-apiserver", pflag.ContinueOnError)
	sets := s.Flags()
	for _, f := range sets.FlagSets {
		flags.AddFlagSet(f)
	}
	if err := flags.Parse([]string{
		"--etcd-servers=" + etcdURL,
		fmt.Sprintf("--secure-port=%d", port),
		"--service-cluster-ip-range=10.96.0.0/16",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + c.creds.keyFile,
		"--service-account-signing-key-file=" + c.creds.keyFile,
		"--token-auth-file=" + c.creds.tokenFile,
		"--authorization-mode=RBAC",
		"--allow-privileged",
		"--endpoint-reconciler-type=none",
		"--advertise-address=127.0.0.1",
		"--shutdown-delay-duration=0s",
		"--profiling=false",
	}); err != nil {
		return fmt.Errorf("set up the api server: %w", err)
	}
	if err := s.GenericServerRunOptions.ComponentGlobalsRegistry.Set(); err != nil {
		return fmt.Errorf("set up the api server: %w", err)
	}
	completed, err := s.Complete(ctx)
	if err != nil {
		return fmt.Errorf("set up the api server: %w", err)
	}
	if errs := completed.Validate(); len(errs) > 0 {
		return fmt.Errorf("set up the api server: %w", utilerrors.NewAggregate(errs))
	}

	failed := make(chan error, 1)
	c.background(ctx, "kube-apiserver", 5*time.Second, func(ctx context.Context) error {
		defer name.Release()
		err := app.Run(ctx, completed)
		failed <- err
		return err
	})
	return c.waitReady(ctx, failed)
}

func (c *ControlPlane) waitReady(ctx context.Context, failed <-chan error) error {
	// The CA file appears while the server starts, so the client is made anew until it works.
	deadline := time.NewTimer(3 * time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	last := errors.New("no answer yet")
	var client *kubernetes.Clientset
	for {
		select {
		case err := <-failed:
			return fmt.Errorf("start the api server: %w", err)
		case <-deadline.C:
			return fmt.Errorf("start the api server: not ready after 3 minutes: %w", last)
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
		if client == nil {
			made, err := kubernetes.NewForConfig(c.Config(Admin))
			if err != nil {
				last = err
				continue
			}
			client = made
		}
		call, cancel := context.WithTimeout(ctx, 2*time.Second)
		last = client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(call).Error()
		cancel()
		if last == nil {
			return nil
		}
	}
}
