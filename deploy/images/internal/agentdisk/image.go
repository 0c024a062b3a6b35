package agentdisk

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Name is the image's last path element.
const Name = "agents"

const (
	diskDir  = "disk/"
	diskFile = diskDir + Name + ".img"
	// qemu is the user that reads the disk in KubeVirt's launcher.
	qemu = 107

	labelVersion = "org.opencontainers.image.version"
	labelTitle   = "org.opencontainers.image.title"
	refName      = "org.opencontainers.image.ref.name"
)

// Image says what an image is.
type Image struct {
	Version   string
	Digest    string // sha256:<hex> of the manifest
	DiskBytes int64  // of the disk, not packed
}

// Build writes the image of the agents in dir as an OCI layout. A layout that stood there is replaced as a whole, and
// only by one that was checked.
func Build(ctx context.Context, dir, layoutDir string) (Image, error) {
	agents, err := readAgents(ctx, dir)
	if err != nil {
		return Image{}, err
	}
	parent := filepath.Dir(layoutDir)
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return Image{}, fmt.Errorf("make the images' folder: %w", err)
	}
	work, err := os.MkdirTemp(parent, "."+Name+"-")
	if err != nil {
		return Image{}, fmt.Errorf("make a folder beside %s: %w", layoutDir, err)
	}
	defer os.RemoveAll(work)
	disk, err := os.Create(filepath.Join(work, Name+".img"))
	if err != nil {
		return Image{}, fmt.Errorf("make the disk's file: %w", err)
	}
	defer disk.Close()
	size, err := writeDisk(disk, agents)
	if err != nil {
		return Image{}, err
	}
	img, err := imageOf(disk.Name(), size, agents[0])
	if err != nil {
		return Image{}, fmt.Errorf("make the image: %w", err)
	}
	fresh := filepath.Join(work, "layout")
	p, err := layout.Write(fresh, empty.Index)
	if err == nil {
		err = p.AppendImage(img, layout.WithPlatform(v1.Platform{OS: "linux", Architecture: agents[0].platform}),
			layout.WithAnnotations(map[string]string{refName: agents[0].version}))
	}
	if err != nil {
		return Image{}, fmt.Errorf("write the layout %s: %w", layoutDir, err)
	}
	_, found, err := open(fresh)
	if err != nil {
		return Image{}, err
	}
	if err := os.RemoveAll(layoutDir); err != nil {
		return Image{}, fmt.Errorf("replace the layout %s: %w", layoutDir, err)
	}
	if err := os.Rename(fresh, layoutDir); err != nil {
		return Image{}, fmt.Errorf("replace the layout %s: %w", layoutDir, err)
	}
	return found, os.Chmod(layoutDir, 0o755)
}

// imageOf wraps the disk in one layer.
func imageOf(disk string, size int64, a agent) (v1.Image, error) {
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		r, w := io.Pipe()
		go func() { w.CloseWithError(writeLayer(w, disk, size)) }() // ends when r is read to its end or closed
		return r, nil
	}, tarball.WithMediaType(types.OCILayer), tarball.WithCompressionLevel(gzip.DefaultCompression))
	if err != nil {
		return nil, err
	}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	base, err = mutate.ConfigFile(base, &v1.ConfigFile{
		OS: "linux", Architecture: a.platform, Created: v1.Time{Time: time.Unix(0, 0).UTC()},
		RootFS: v1.RootFS{Type: "layers"},
		Config: v1.Config{Labels: map[string]string{labelVersion: a.version, labelTitle: "CosmicAC agents"}},
	})
	if err != nil {
		return nil, err
	}
	return mutate.Append(base, mutate.Addendum{Layer: layer, History: v1.History{CreatedBy: "cosmicac-images", Created: v1.Time{Time: time.Unix(0, 0).UTC()}}})
}

func writeLayer(w io.Writer, disk string, size int64) error {
	f, err := os.Open(disk)
	if err != nil {
		return err
	}
	defer f.Close()
	t := tar.NewWriter(w)
	dir, file := header(diskDir, 0o555, 0), header(diskFile, 0o440, size)
	dir.Typeflag = tar.TypeDir
	for _, h := range []*tar.Header{dir, file} {
		h.Uid, h.Gid = qemu, qemu
		if err := t.WriteHeader(h); err != nil {
			return err
		}
	}
	if _, err := io.Copy(t, f); err != nil {
		return err
	}
	return t.Close()
}

// Push writes the image of a layout to <registry>/agents:<version> and gives that reference. A tag that already names
// another image is left alone unless replace is set: machines of one version must not run two different disks.
func Push(ctx context.Context, layoutDir, registry string, replace bool) (string, Image, error) {
	img, found, err := open(layoutDir)
	if err != nil {
		return "", Image{}, err
	}
	ref, err := name.NewTag(registry + "/" + Name + ":" + found.Version)
	if err != nil {
		return "", Image{}, fmt.Errorf("registry %q: want a host and a path like registry.example/cosmicac: %w", registry, err)
	}
	options := []remote.Option{remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain)}
	there, err := remote.Head(ref, options...)
	var answer *transport.Error
	switch {
	case err == nil && there.Digest.String() == found.Digest:
		return ref.String(), found, nil
	case err == nil && !replace:
		return "", Image{}, fmt.Errorf("%s is already another image (%s): give this build a version of its own, or say --replace", ref, there.Digest)
	case err != nil && !(errors.As(err, &answer) && answer.StatusCode == http.StatusNotFound):
		return "", Image{}, fmt.Errorf("look for %s: %w", ref, err)
	}
	if err := remote.Write(ref, img, options...); err != nil {
		return "", Image{}, fmt.Errorf("push %s: %w", ref, err)
	}
	return ref.String(), found, nil
}
