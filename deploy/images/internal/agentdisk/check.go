package agentdisk

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

// sector is what a virtual disk's size is counted in.
const sector = 512

// Where ext4 has its magic number.
const (
	superblock = 1024
	magicAt    = superblock + 0x38
	ext4Magic  = 0xEF53
)

// Check says whether KubeVirt can take an image as the agents' containerDisk: digests and sizes hold, exactly one disk in
// /disk, which qemu's user may read, of whole sectors and with an ext4 file system. It reads the whole image.
func Check(img v1.Image) (Image, error) {
	if err := validate.Image(img); err != nil {
		return Image{}, fmt.Errorf("the image does not hold together: %w", err)
	}
	media, err := img.MediaType()
	if err != nil {
		return Image{}, err
	}
	if media != types.OCIManifestSchema1 && media != types.DockerManifestSchema2 {
		return Image{}, fmt.Errorf("the manifest is a %s, not that of one image", media)
	}
	config, err := img.ConfigFile()
	if err != nil {
		return Image{}, fmt.Errorf("read the image's configuration: %w", err)
	}
	found := Image{Version: config.Config.Labels[labelVersion]}
	if config.OS != "linux" || !tagForm.MatchString(found.Version) {
		return Image{}, fmt.Errorf("the image is for %q and its label %s says %q: not one of ours", config.OS, labelVersion, found.Version)
	}
	err = eachDisk(img, func(h *tar.Header, content io.Reader) error {
		if found.DiskBytes != 0 {
			return fmt.Errorf("/%s is a second disk; KubeVirt wants exactly one", h.Name)
		}
		found.DiskBytes = h.Size
		return checkDisk(h, content)
	})
	if err != nil {
		return Image{}, err
	}
	if found.DiskBytes == 0 {
		return Image{}, fmt.Errorf("there is no disk in /%s", diskDir)
	}
	digest, err := img.Digest()
	if err != nil {
		return Image{}, err
	}
	found.Digest = digest.String()
	return found, nil
}

func checkDisk(h *tar.Header, content io.Reader) error {
	if h.Uid != qemu || h.Gid != qemu || h.Mode&0o400 == 0 {
		return fmt.Errorf("/%s belongs to %d:%d with mode %04o; qemu's user %d must be able to read it", h.Name, h.Uid, h.Gid, h.Mode, qemu)
	}
	if h.Size%sector != 0 {
		return fmt.Errorf("/%s has %d bytes, which are no whole sectors", h.Name, h.Size)
	}
	head := make([]byte, magicAt+2)
	switch _, err := io.ReadFull(content, head); {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("/%s is shorter than a file system", h.Name)
	case err != nil:
		return fmt.Errorf("read /%s: %w", h.Name, err)
	}
	if bytes.HasPrefix(head, []byte("QFI\xfb")) || binary.LittleEndian.Uint16(head[magicAt:]) != ext4Magic {
		return fmt.Errorf("/%s is no raw ext4 file system", h.Name)
	}
	return nil
}

// eachDisk calls f for every regular file in /disk of the flattened image.
func eachDisk(img v1.Image, f func(*tar.Header, io.Reader) error) error {
	flat := mutate.Extract(img)
	defer flat.Close()
	for t := tar.NewReader(flat); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the image's files: %w", err)
		}
		if h.Typeflag != tar.TypeReg || !strings.HasPrefix(path.Clean("/"+h.Name), "/"+diskDir) {
			continue
		}
		if err := f(h, t); err != nil {
			return err
		}
	}
}

// open reads and checks the one image of a layout.
func open(layoutDir string) (v1.Image, Image, error) {
	index, err := layout.ImageIndexFromPath(layoutDir)
	if err != nil {
		return nil, Image{}, fmt.Errorf("read the layout %s (build it first): %w", layoutDir, err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return nil, Image{}, fmt.Errorf("read the layout %s: %w", layoutDir, err)
	}
	if len(manifest.Manifests) != 1 {
		return nil, Image{}, fmt.Errorf("the layout %s has %d images; want one", layoutDir, len(manifest.Manifests))
	}
	img, err := index.Image(manifest.Manifests[0].Digest)
	if err != nil {
		return nil, Image{}, fmt.Errorf("read the layout %s: %w", layoutDir, err)
	}
	found, err := Check(img)
	if err != nil {
		return nil, Image{}, fmt.Errorf("the layout %s: %w", layoutDir, err)
	}
	return img, found, nil
}

// CheckRemote checks an image in a registry. Where the reference is a tag, it must be the image's version, since the
// workers ask for it by theirs.
func CheckRemote(ctx context.Context, reference string) (Image, error) {
	ref, err := name.ParseReference(reference)
	if err != nil {
		return Image{}, fmt.Errorf("image %q: want a reference like registry.example/cosmicac/agents:v1: %w", reference, err)
	}
	img, err := remote.Image(ref, remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain))
	if err != nil {
		return Image{}, fmt.Errorf("fetch %s: %w", ref, err)
	}
	found, err := Check(img)
	if err != nil {
		return Image{}, fmt.Errorf("%s: %w", ref, err)
	}
	if tag, ok := ref.(name.Tag); ok && tag.TagStr() != found.Version {
		return Image{}, fmt.Errorf("%s holds version %s: workers of version %s would start other agents than their own", ref, found.Version, tag.TagStr())
	}
	return found, nil
}

// Unpack writes the disk of a layout to a file, which a virtual machine can be given.
func Unpack(layoutDir, file string) error {
	img, _, err := open(layoutDir)
	if err != nil {
		return err
	}
	return eachDisk(img, func(_ *tar.Header, content io.Reader) error {
		f, err := os.Create(file)
		if err != nil {
			return fmt.Errorf("write the disk: %w", err)
		}
		_, err = io.Copy(f, content)
		if err = errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("write the disk %s: %w", file, err)
		}
		return nil
	})
}
