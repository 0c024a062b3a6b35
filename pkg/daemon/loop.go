package daemon

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"

	"github.com/cosmicac/cosmicac/pkg/health"
	"github.com/cosmicac/cosmicac/pkg/identity"
)

const (
	// statusEvery is the period of the status file and of the health checks.
	statusEvery = 5 * time.Second
	// rosterWarning is how long before its expiry a roster is warned of.
	rosterWarning = 30 * 24 * time.Hour
	// settling is how long after start a missing bootstrap or network key is normal.
	settling = 30 * time.Second
	// diskLow is the free space of the state folder's disk that is warned of, in bytes.
	diskLow = 512 << 20
	// diskFull is what counts as none, in bytes: databases refuse to write by then.
	diskFull = 8 << 20
)

// loop is the daemon's main loop. It returns what ended the daemon, nil for a
// signal, and whether the service's run has not returned yet.
func (e *Env) loop(signals <-chan os.Signal, returned <-chan error) (cause error, runs bool) {
	warnings, cancelWarnings := e.Health.Subscribe()
	defer cancelWarnings()
	network, cancelNetwork := e.Network.Subscribe()
	defer cancelNetwork()
	tick := time.NewTicker(statusEvery)
	defer tick.Stop()
	var feed <-chan time.Time
	if period, err := sd.SdWatchdogEnabled(false); err == nil && period > 0 {
		watchdog := time.NewTicker(period / 2)
		defer watchdog.Stop()
		feed = watchdog.C
	}
	e.watch()
	e.writeStatus(nil)
	for runs = true; ; {
		select {
		case s := <-signals:
			if s != syscall.SIGHUP {
				return nil, runs
			}
			if err := e.log.Reopen(); err != nil {
				e.Log.Error("reopen log file", "error", err)
			} else {
				e.Log.Info("log file reopened")
			}
		case err := <-e.fatal:
			return err, runs
		case err := <-returned:
			runs = false
			if err != nil {
				return err, runs
			}
			returned = nil // it wired itself and returned; its parts go on
		case <-feed:
			if late := e.late(); late != "" {
				e.Log.Error("watchdog not fed", "late", late)
			} else {
				notify(sd.SdNotifyWatchdog)
			}
		case <-tick.C:
			e.watch()
			e.writeStatus(nil)
		case <-network:
			e.watch()
			e.writeStatus(nil)
		case <-warnings:
			e.writeStatus(nil)
		case <-e.changed:
			e.writeStatus(nil)
		}
	}
}

// writeStatus replaces the status file; a failure is a warning.
func (e *Env) writeStatus(stoppedAt *time.Time) {
	s := &Status{
		Service: e.Service, Name: e.Name, Key: e.Key.ID().String(), Network: e.Network.ID().String(), InstanceID: e.Instance(),
		Version: e.Version, PID: os.Getpid(), StartedAt: e.StartedAt.UTC(), UpdatedAt: e.clock().UTC(), StoppedAt: stoppedAt,
		Ready: e.IsReady(), Addresses: []string{}, RosterVersion: e.Network.Roster().GetVersion(), LogFile: e.log.File(),
		Warnings: rawWarnings(e.Health.List()),
	}
	e.mu.Lock()
	s.HTTPAddresses = append([]string{}, e.http...)
	e.mu.Unlock()
	if n := e.meshNode(); n != nil && stoppedAt == nil {
		s.Addresses = append(s.Addresses, n.Addresses()...)
	}
	if stoppedAt != nil {
		s.HTTPAddresses = []string{}
	}
	e.storage("status file", s.write(e.base.StatusFile))
}

// storage raises or clears the storage warning of one subject.
func (e *Env) storage(subject string, err error) {
	if err != nil {
		e.Health.RaiseFor(health.StorageFailing, subject, "writing the "+subject, err)
	} else {
		e.Health.ClearFor(health.StorageFailing, subject)
	}
}

// watch looks at what every daemon has: roster, keys, disk, log, bootstraps.
func (e *Env) watch() {
	now := e.clock()
	e.storage("network records", e.Network.Tick())
	e.storage("log file", e.log.Failure())
	e.watchRoster(now)
	raise := func(holds bool, code health.Code, args ...any) {
		if holds {
			e.Health.Raise(code, args...)
		} else {
			e.Health.Clear(code)
		}
	}
	settled := time.Since(e.StartedAt) > settling
	raise(settled && e.Network.NetworkKey() == nil, health.NoNetworkKey)
	if settled {
		others, reached := e.bootstraps()
		raise(others > 0 && reached == 0, health.NoBootstrapReachable, others, "no connection to any")
	}
	if n := e.meshNode(); n != nil {
		e.watchPeers(n, now)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(e.StateDirectory, &fs); err == nil {
		free := fs.Bavail * uint64(fs.Bsize)
		var full error
		if free < diskFull {
			full = errors.New("no space is left on its disk")
		}
		e.storage("state folder "+e.StateDirectory, full)
		raise(free < diskLow, health.StoreDiskLow, e.StateDirectory, fmt.Sprintf("%d MiB", free>>20))
	}
}

func (e *Env) watchRoster(now time.Time) {
	_, listed := e.Network.Known(e.Key.ID())
	if !listed {
		e.Health.Raise(health.NotInRoster, e.Key.ID())
	} else {
		e.Health.Clear(health.NotInRoster)
	}
	expiry := e.Network.RosterNotAfter()
	left := expiry.Sub(now)
	switch {
	case expiry.IsZero() || left > rosterWarning:
		e.Health.Clear(health.RosterExpiresSoon)
		e.Health.Clear(health.RosterExpired)
	case e.Network.Expired():
		e.Health.Clear(health.RosterExpiresSoon)
		e.Health.Raise(health.RosterExpired, expiry.UTC().Format(time.RFC3339))
	default:
		e.Health.Clear(health.RosterExpired)
		e.Health.Raise(health.RosterExpiresSoon, expiry.UTC().Format(time.RFC3339), inDays(left))
	}
}

func inDays(d time.Duration) string {
	if days := int(d.Hours() / 24); days > 0 {
		return fmt.Sprintf("%d days", days)
	}
	return "less than a day"
}

// bootstraps counts the bootstraps other than this node, and those reached.
func (e *Env) bootstraps() (others, reached int) {
	n := e.meshNode()
	if n == nil {
		return 0, 0
	}
	for _, b := range e.Network.Info().GetBootstraps() {
		p, err := identity.ParseID(b.GetKey())
		if err != nil || p == e.Key.ID() {
			continue
		}
		others++
		if n.Connected(p) {
			reached++
		}
	}
	return others, reached
}
