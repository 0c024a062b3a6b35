package main

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
)

//go:embed holepunch/package.json holepunch/package-lock.json holepunch/program.js
var holepunchFiles embed.FS

// installHolepunch puts Holepunch's modules and the program that uses them into a
// folder of the user's cache, once for each version of them, and returns it. An
// error says why there is no Holepunch to compare with.
func installHolepunch(progress io.Writer) (dir string, err error) {
	for _, program := range []string{"node", "npm"} {
		if _, err := exec.LookPath(program); err != nil {
			return "", fmt.Errorf("%s is not installed", program)
		}
	}
	files, err := fs.Sub(holepunchFiles, "holepunch")
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	entries, err := fs.ReadDir(files, ".")
	if err != nil {
		return "", err
	}
	for _, e := range entries {
		content, err := fs.ReadFile(files, e.Name())
		if err != nil {
			return "", err
		}
		fmt.Fprintf(sum, "%s %d\n%s", e.Name(), len(content), content)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	cache = filepath.Join(cache, "cosmicac")
	dir = filepath.Join(cache, "bench-holepunch-"+hex.EncodeToString(sum.Sum(nil)[:8]))
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	fmt.Fprintln(progress, "installing Holepunch's modules with npm (once for each version)")
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	fresh, err := os.MkdirTemp(cache, ".bench-holepunch-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(fresh)
	if err := os.CopyFS(fresh, files); err != nil {
		return "", err
	}
	npm := exec.Command("npm", "ci", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error")
	npm.Dir, npm.Stdout, npm.Stderr = fresh, progress, progress
	if err := npm.Run(); err != nil {
		return "", fmt.Errorf("npm ci of hyperdht and @hyperswarm/rpc: %w", err)
	}
	if err := os.Rename(fresh, dir); err != nil {
		if _, exists := os.Stat(dir); exists == nil {
			return dir, nil // another run was quicker
		}
		return "", err
	}
	return dir, nil
}
