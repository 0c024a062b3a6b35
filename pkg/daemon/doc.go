// Package daemon is the life of a daemon: flags, configuration, folder and key,
// log, status file, readiness, signals, ordered start and reverse stop.
//
// A daemon's main is one line:
//
//	func main() { daemon.Main("wrk-ork", app.Defaults, app.Base, app.Run) }
//
// Start goes in this order, and each step says in words what is wrong with it:
// flags and configuration (exit 2 if bad); the state folder and its lock; the log;
// the key; the network; the binding of folder, key and network; then the service's
// run function, which wires itself from top to bottom and returns, or blocks until
// its context ends.
//
// Stop goes backwards over what was given to Go and OnStop, within StopTime in
// all. It is caused by SIGTERM or SIGINT, by an error of run or of a function given
// to Go (exit 1). A second signal exits at once. SIGHUP reopens the log file.
//
// The main loop writes the status file every five seconds and on change, watches
// roster, disk and bootstraps for health warnings, and pings systemd's watchdog;
// a beat (Env.Beat) that is late stops the pings.
//
// It does not restart a part that failed, does not reload configuration, does not
// daemonize, and knows nothing of Kubernetes.
package daemon
