package rules

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

const module = "github.com/cosmicac/cosmicac/"

// maxLines is where a file gets hard to hold in one's head.
const maxLines = 600

// source is one Go file of ours.
type source struct {
	path      string // from the root of the repository
	dir       string
	test      bool
	generated bool
	lines     int
	syntax    *ast.File // imports and comments before the package clause
}

// root is the folder with go.work.
var root = sync.OnceValue(func() string {
	dir, err := os.Getwd()
	if err != nil {
		panic(err)
	}
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.work")); err == nil {
			return dir
		}
		if dir == filepath.Dir(dir) {
			panic("no go.work above the test")
		}
	}
})

var generatedMark = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)

// sources parses every Go file below pkg and services once.
var sources = sync.OnceValues(func() ([]source, error) {
	var all []source
	for _, top := range []string{"pkg", "services"} {
		err := filepath.WalkDir(filepath.Join(root(), top), func(path string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case d.IsDir() && (d.Name() == "testdata" || d.Name() == "node_modules" || strings.HasPrefix(d.Name(), ".")):
				return filepath.SkipDir
			case d.IsDir() || !strings.HasSuffix(path, ".go"):
				return nil
			}
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			syntax, err := parser.ParseFile(token.NewFileSet(), path, data, parser.ImportsOnly|parser.ParseComments)
			if err != nil {
				return err
			}
			rel, err := filepath.Rel(root(), path)
			all = append(all, source{
				path: rel, dir: filepath.Dir(rel), test: strings.HasSuffix(path, "_test.go"),
				generated: generatedMark.Match(data), lines: bytes.Count(data, []byte("\n")), syntax: syntax,
			})
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return all, nil
})

func eachSource(t *testing.T, f func(s source)) {
	t.Helper()
	all, err := sources()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		f(s)
	}
}

// A newcomer reads `go doc` first; two comments would contradict each other.
func TestEachPackageHasOneDocCommentThatSaysWhatItDoesNotDo(t *testing.T) {
	t.Parallel()
	docs := make(map[string][]source)
	eachSource(t, func(s source) {
		if s.test {
			return
		}
		if _, ok := docs[s.dir]; !ok {
			docs[s.dir] = nil
		}
		if s.syntax.Doc != nil && strings.TrimSpace(s.syntax.Doc.Text()) != "" {
			docs[s.dir] = append(docs[s.dir], s)
		}
	})
	limits := regexp.MustCompile(`(?i)\b(not|no|never|nothing|nor|none|neither)\b`)
	for dir, files := range docs {
		if len(files) != 1 {
			t.Errorf("%s has %d package comments, want one", dir, len(files))
			continue
		}
		name, text := files[0].syntax.Name.Name, files[0].syntax.Doc.Text()
		switch {
		case name == "main":
			if !strings.HasPrefix(text, "Command ") {
				t.Errorf("%s: the comment of a program begins with \"Command <name>\"", files[0].path)
			}
		case !strings.HasPrefix(text, "Package "+name+" "):
			t.Errorf("%s: the comment begins with \"Package %s\"", files[0].path, name)
		case !limits.MatchString(text):
			t.Errorf("%s: the comment says what the package does not do, too", files[0].path)
		}
	}
}

// Such names say nothing and so end up holding everything.
func TestNoPackageHasANameThatSaysNothing(t *testing.T) {
	t.Parallel()
	eachSource(t, func(s source) {
		if slices.Contains([]string{"util", "utils", "common", "helper", "helpers", "manager", "base", "misc", "shared"}, s.syntax.Name.Name) {
			t.Errorf("%s: package %s: name it after the one thing it holds", s.path, s.syntax.Name.Name)
		}
	})
}

func TestNoFileIsTooLongToRead(t *testing.T) {
	t.Parallel()
	eachSource(t, func(s source) {
		if !s.generated && s.lines > maxLines {
			t.Errorf("%s has %d lines, at most %d: split it by concern", s.path, s.lines, maxLines)
		}
	})
}

// What is shared must not know who shares it, and services meet on the wire only.
func TestLayersAreKept(t *testing.T) {
	t.Parallel()
	eachSource(t, func(s source) {
		for _, spec := range s.syntax.Imports {
			path, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			to, ours := strings.CutPrefix(path, module)
			if !ours {
				continue
			}
			if strings.HasPrefix(s.dir, "pkg") && strings.HasPrefix(to, "services/") {
				t.Errorf("%s imports %s: pkg imports no service", s.path, to)
			}
			if from, other := service(s.dir), service(to); from != "" && other != "" && from != other {
				t.Errorf("%s imports %s: services share code through pkg", s.path, to)
			}
			if to == "pkg/rules" {
				t.Errorf("%s imports pkg/rules, which holds tests only", s.path)
			}
		}
	})
}

// service is the service that a folder belongs to, or "".
func service(dir string) string {
	parts := strings.Split(filepath.ToSlash(dir), "/")
	if len(parts) < 2 || parts[0] != "services" {
		return ""
	}
	return parts[1]
}

// The program is in internal/app, where a test can run it; main only calls it.
func TestEveryServiceHasAShortMainAndAReadme(t *testing.T) {
	t.Parallel()
	eachSource(t, func(s source) {
		if service(s.dir) == "" || s.syntax.Name.Name != "main" || s.test {
			return
		}
		if filepath.Base(s.path) == "main.go" && s.lines > 30 {
			t.Errorf("%s has %d lines, at most 30", s.path, s.lines)
		}
		if filepath.Dir(s.dir) != "services" {
			return
		}
		if info, err := os.Stat(filepath.Join(root(), s.dir, "README.md")); err != nil || info.Size() == 0 {
			t.Errorf("%s has no README.md: what it is, what facts it owns, its keys, how to see it", s.dir)
		}
	})
}
