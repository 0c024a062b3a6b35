package ssh

import (
	"bufio"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// Account is the login that sessions run as.
type Account struct {
	Name  string
	UID   uint32
	GID   uint32
	Home  string
	Shell string
	// Groups are the supplementary ones, GID included.
	Groups []uint32
	// Switch tells that the process must change to it; false where this
	// process is not root and can only be itself.
	Switch bool
}

// FindAccount looks name up in passwd and group under etc ("/etc"). Without
// root the answer is the current user, whatever the name. The agent is a static
// binary, so accounts of LDAP and other name services are not found.
func FindAccount(etc, name string) (Account, error) {
	if os.Geteuid() != 0 {
		return currentAccount(etc)
	}
	if name == "" {
		name = "root"
	}
	a, ok := readPasswd(filepath.Join(etc, "passwd"), func(f []string) bool { return f[0] == name })
	if !ok {
		return Account{}, fault.New(fault.NotFound, "no such user %q in %s/passwd of this VM: the image's default user is wrong, or was removed", name, etc)
	}
	a.Groups = readGroups(filepath.Join(etc, "group"), a.Name, a.GID)
	a.Switch = true
	return a, nil
}

func currentAccount(etc string) (Account, error) {
	uid := strconv.Itoa(os.Geteuid())
	a, ok := readPasswd(filepath.Join(etc, "passwd"), func(f []string) bool { return f[2] == uid })
	if ok {
		return a, nil
	}
	a = Account{Name: uid, UID: uint32(os.Geteuid()), GID: uint32(os.Getegid()), Home: "/", Shell: "/bin/sh"}
	if u, err := user.Current(); err == nil {
		a.Name, a.Home = u.Username, u.HomeDir
	}
	return a, nil
}

func readPasswd(path string, match func([]string) bool) (Account, bool) {
	f, err := os.Open(path)
	if err != nil {
		return Account{}, false
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		p := strings.Split(lines.Text(), ":")
		if len(p) < 7 || !match(p) {
			continue
		}
		uid, err := strconv.ParseUint(p[2], 10, 32)
		if err != nil {
			continue
		}
		gid, err := strconv.ParseUint(p[3], 10, 32)
		if err != nil {
			continue
		}
		a := Account{Name: p[0], UID: uint32(uid), GID: uint32(gid), Home: p[5], Shell: p[6]}
		if a.Shell == "" {
			a.Shell = "/bin/sh"
		}
		if a.Home == "" {
			a.Home = "/"
		}
		return a, true
	}
	return Account{}, false
}

func readGroups(path, name string, primary uint32) []uint32 {
	groups := []uint32{primary}
	f, err := os.Open(path)
	if err != nil {
		return groups
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		p := strings.Split(lines.Text(), ":")
		if len(p) < 4 {
			continue
		}
		gid, err := strconv.ParseUint(p[2], 10, 32)
		if err != nil || uint32(gid) == primary {
			continue
		}
		for _, member := range strings.Split(p[3], ",") {
			if member == name {
				groups = append(groups, uint32(gid))
				break
			}
		}
	}
	return groups
}

// Attributes puts a process under this account; Setsid and the like are the caller's.
func (a Account) Attributes() *syscall.SysProcAttr {
	attributes := &syscall.SysProcAttr{}
	if a.Switch {
		attributes.Credential = &syscall.Credential{Uid: a.UID, Gid: a.GID, Groups: a.Groups}
	}
	return attributes
}

// Directory is the account's home, or "/" where it has none.
func (a Account) Directory() string {
	if info, err := os.Stat(a.Home); err == nil && info.IsDir() {
		return a.Home
	}
	return "/"
}

// Environment is what a login starts with: who it is, a search path, and then
// the job's own variables, which may replace the path but not the identity.
func (a Account) Environment(job map[string]string) []string {
	path := "/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games"
	if a.UID == 0 {
		path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	}
	env := []string{"PATH=" + path}
	for k, v := range job {
		env = append(env, k+"="+v)
	}
	return append(env, "HOME="+a.Home, "USER="+a.Name, "LOGNAME="+a.Name, "SHELL="+a.Shell)
}
