package fault

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/clientcmd"
)

const usage = `usage: cosmicac-devcluster fault list  --dir DIR
       cosmicac-devcluster fault set   --dir DIR SWITCH TARGETS...
       cosmicac-devcluster fault clear --dir DIR [SWITCH...]

DIR is the state folder of a running cluster. TARGETS are what "fault list" says for the switch, * for all.
"clear" without a switch clears all. A change is seen within a second.
`

// ErrUsage says that the command line was wrong.
var ErrUsage = errors.New("wrong command line")

// Command runs `fault ...` against a running cluster.
func Command(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 0 || !slices.Contains([]string{"list", "set", "clear"}, args[0]) {
		return fmt.Errorf("%w\n%s", ErrUsage, usage)
	}
	flags := flag.NewFlagSet("fault", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	dir := flags.String("dir", "", "")
	if err := flags.Parse(args[1:]); err != nil {
		return fmt.Errorf("%w: %w\n%s", ErrUsage, err, usage)
	}
	if *dir == "" {
		return fmt.Errorf("%w: --dir is required\n%s", ErrUsage, usage)
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	cfg, err := clientcmd.BuildConfigFromFlags("", filepath.Join(*dir, "admin.kubeconfig"))
	if err != nil {
		return fmt.Errorf("--dir %s: no cluster was started there: %w", *dir, err)
	}
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return fmt.Errorf("--dir %s: %w", *dir, err)
	}
	maps := client.CoreV1().ConfigMaps(Namespace)
	switch args[0] {
	case "set":
		return set(ctx, *dir, maps, flags.Args())
	case "clear":
		return clearSwitches(ctx, maps, flags.Args())
	}
	return list(ctx, maps, out)
}

func set(ctx context.Context, dir string, cms typedcorev1.ConfigMapInterface, args []string) error {
	if len(args) < 2 {
		return fmt.Errorf("%w: set wants a switch and its targets\n%s", ErrUsage, usage)
	}
	s, ok := Find(args[0])
	if !ok {
		return fmt.Errorf("%w: there is no switch %q; \"fault list\" shows all", ErrUsage, args[0])
	}
	if s.Kind == API {
		if _, err := os.Stat(filepath.Join(dir, ProxyPort)); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%w: %s works on what passes the API proxy, and the cluster of %s runs without one; start it with --api-proxy", ErrUsage, s.Name, dir)
		} else if err != nil {
			return fmt.Errorf("find out whether the cluster of %s runs with --api-proxy: %w", dir, err)
		}
	}
	value := strings.Join(args[1:], " ")
	if err := s.Check(value); err != nil {
		return fmt.Errorf("%w: %w", ErrUsage, err)
	}
	return patch(ctx, cms, map[string]*string{s.Name: &value})
}

func clearSwitches(ctx context.Context, cms typedcorev1.ConfigMapInterface, names []string) error {
	if len(names) == 0 {
		if err := cms.Delete(ctx, ConfigMap, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("clear all switches: %w", err)
		}
		return nil
	}
	change := map[string]*string{}
	for _, n := range names {
		if _, ok := Find(n); !ok {
			return fmt.Errorf("%w: there is no switch %q; \"fault list\" shows all", ErrUsage, n)
		}
		change[n] = nil
	}
	return patch(ctx, cms, change)
}

func patch(ctx context.Context, cms typedcorev1.ConfigMapInterface, change map[string]*string) error {
	raw, err := json.Marshal(map[string]any{"data": change})
	if err != nil {
		return err
	}
	_, err = cms.Patch(ctx, ConfigMap, types.MergePatchType, raw, metav1.PatchOptions{})
	if apierrors.IsNotFound(err) {
		_, err = cms.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: ConfigMap}}, metav1.CreateOptions{})
		if err == nil || apierrors.IsAlreadyExists(err) {
			_, err = cms.Patch(ctx, ConfigMap, types.MergePatchType, raw, metav1.PatchOptions{})
		}
	}
	if err != nil {
		return fmt.Errorf("write the switches: %w", err)
	}
	return nil
}

// list prints every switch, those that are on with their targets, and keys that are no switch.
func list(ctx context.Context, cms typedcorev1.ConfigMapInterface, out io.Writer) error {
	cm, err := cms.Get(ctx, ConfigMap, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		cm, err = &corev1.ConfigMap{}, nil
	}
	if err != nil {
		return fmt.Errorf("read the switches: %w", err)
	}
	w := tabwriter.NewWriter(out, 2, 8, 2, ' ', 0)
	fmt.Fprintln(w, "SWITCH\tON FOR\tTARGETS\tWHAT HAPPENS (SIMULATED)")
	unknown := maps.Clone(cm.Data)
	for _, s := range Switches {
		on, ok := cm.Data[s.Name]
		if !ok {
			on = "-"
		}
		delete(unknown, s.Name)
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", s.Name, on, s.Kind, s.Says)
	}
	for _, name := range slices.Sorted(maps.Keys(unknown)) {
		fmt.Fprintf(w, "%s\t%s\t?\tno such switch: it does nothing\n", name, unknown[name])
	}
	return w.Flush()
}
