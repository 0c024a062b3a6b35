package cli

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/demo"
	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/install"
)

func (e *environment) bootstrapCommand() *cobra.Command {
	var h install.Host
	var email string
	var noStart bool
	c := &cobra.Command{
		Use:     "bootstrap",
		Short:   "Set up this host after `make install`: keys, roster, configs, units, one rack",
		Example: "  cosmicac bootstrap --kubeconfig /root/gpu-cluster.kubeconfig --location us --announce cosmicac.example --site https://cosmicac.example",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if h.Root == "" && os.Geteuid() != 0 {
				return fault.New(fault.Denied, "bootstrap writes to /etc and /var/lib: run it as root, or give --root")
			}
			if h.Rack == "" {
				h.Rack = h.Location
			}
			if h.Announce == "" {
				h.Announce, _ = os.Hostname()
			}
			if h.Site == "" {
				h.Site = "https://" + h.Announce
			}
			h.Now = time.Now()
			result, err := h.Install()
			if err != nil {
				return err
			}
			fmt.Fprintf(e.out, "made network %s with a key for each daemon\n", result.NetworkID)
			fmt.Fprintf(e.out, "MOVE %s TO A SAFE PLACE: it is the only way back if root.key is lost\n", result.SecondRootKeyFile)
			workerKey := result.Keys["worker-"+h.Rack]
			left := fmt.Sprintf("  runuser -u cosmicac-app -- cosmicac-app-node create-administrator --config /etc/cosmicac/app-node.yaml --email %s\n"+
				"  systemctl enable --now cosmicac.target cosmicac-wrk-server-k8s-nvidia@%s.service\n"+
				"  cosmicac rpc call wrk-ork cosmicac.ork.v1.Racks/PutRack '{\"entry\": {\"id\": \"%s\", \"location\": \"%s\", \"key\": \"%s\"}}'\n",
				email, h.Rack, h.Rack, h.Location, workerKey)
			if noStart || h.Root != "" {
				fmt.Fprintf(e.out, "nothing was started; on the host run:\n%s", left)
				return nil
			}
			if err := e.startHost(cmd, h, email, workerKey); err != nil {
				fmt.Fprintf(e.out, "keys and configs are written, not all is started; when the cause below is mended, go on from where it stopped with:\n%s", left)
				return err
			}
			return nil
		},
	}
	f := c.Flags()
	f.StringVar(&h.Kubeconfig, "kubeconfig", "", "credentials of the rack's cluster, under the shipped Role (deploy/kubernetes)")
	f.StringVar(&h.Location, "location", "", "location code of the first rack, as us")
	f.StringVar(&h.Rack, "rack", "", "id of the first rack (default: the location)")
	f.StringVar(&h.Namespace, "namespace", "cosmicac", "namespace of the rack's objects in the cluster")
	f.StringVar(&h.Announce, "announce", "", "this host as other hosts and VMs reach it (default: its host name)")
	f.StringVar(&h.Site, "site", "", "address of the front door (default: https:// and --announce)")
	f.StringVar(&h.NetworkName, "name", "cosmicac", "a name for the network")
	f.StringVar(&email, "email", "admin@localhost", "login of the first administrator")
	f.StringVar(&h.Root, "root", "", "write below another root; starts nothing")
	f.BoolVar(&noStart, "no-start", false, "write everything, start nothing")
	_ = c.MarkFlagRequired("kubeconfig")
	_ = c.MarkFlagRequired("location")
	return c
}

// startHost makes the administrator, starts the units and registers the rack.
func (e *environment) startHost(cmd *cobra.Command, h install.Host, email, workerKey string) error {
	password, err := install.Password()
	if err != nil {
		return err
	}
	create := exec.CommandContext(cmd.Context(), "runuser", "-u", "cosmicac-app", "--", "/usr/local/bin/cosmicac-app-node", "create-administrator", "--config", "/etc/cosmicac/app-node.yaml", "--email", email)
	create.Stdin = strings.NewReader(password + "\n")
	if out, err := create.CombinedOutput(); err != nil {
		return fault.Wrap(fault.Internal, err, "make the first administrator: %s", out)
	}
	units := []string{"enable", "--now", "cosmicac.target", "cosmicac-wrk-server-k8s-nvidia@" + h.Rack + ".service"}
	if out, err := exec.CommandContext(cmd.Context(), "systemctl", units...).CombinedOutput(); err != nil {
		return fault.Wrap(fault.Unavailable, err, "systemctl %s: %s", strings.Join(units, " "), out)
	}
	fmt.Fprintln(e.out, "started cosmicac.target and the rack's worker")
	var last error
	for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); time.Sleep(2 * time.Second) {
		last = withOperator(cmd.Context(), h.OperatorDirectory(), func(node *mesh.Node, _ string) error {
			ork := node.Network().ByRole(meshv1.Role_ROLE_ORK)
			p, err := peerOf(ork[0])
			if err != nil {
				return err
			}
			_, err = orkv1.NewRacksClient(node.Client(p)).PutRack(cmd.Context(), &orkv1.PutRackRequest{Entry: &orkv1.RackEntry{Id: h.Rack, Location: h.Location, Key: workerKey}})
			return err
		})
		if last == nil || cmd.Context().Err() != nil {
			break
		}
	}
	if last != nil {
		return fault.Wrap(fault.KindOf(last), last, "register rack %s; look at journalctl -u cosmicac-wrk-ork", h.Rack)
	}
	fmt.Fprintf(e.out, "registered rack %s in %s\n\nWeb interface  %s\nLogin          %s  %s   (shown once)\n", h.Rack, h.Location, h.Site, email, password)
	return nil
}

func (e *environment) demoCommand() *cobra.Command {
	// Through the proxy, so that every switch of "cosmicac-devcluster fault" works on it.
	o := demo.Options{ClusterFlags: []string{"--api-proxy"}}
	c := &cobra.Command{
		Use:   "demo",
		Short: "Start the whole platform on loopback and run the main job (GPUs and machines are simulated)",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, dir := range []string{o.Bin, filepath.Join(o.Repository, "deploy")} {
				if info, err := os.Stat(dir); err != nil || !info.IsDir() {
					return fault.New(fault.Invalid, "%s is not a folder: run make demo in the repository, or name --bin and --repository", dir)
				}
			}
			o.Out = e.out
			return demo.Run(cmd.Context(), o)
		},
	}
	f := c.Flags()
	f.StringVar(&o.Bin, "bin", "build/bin", "folder with the binaries")
	f.StringVar(&o.UI, "ui", "build/ui", "folder with the built web interface")
	f.StringVar(&o.Repository, "repository", ".", "folder with deploy/")
	f.StringVar(&o.Directory, "dir", "", "folder for everything the demo writes (default: a free one below build/)")
	f.IntVar(&o.Port, "port", 0, "port of the web interface (0: a free one)")
	f.BoolVar(&o.Once, "once", false, "end after the main job; exit status 1 if it fell short")
	f.BoolVar(&o.SkipMainJob, "no-main-job", false, "only start the platform")
	return c
}
