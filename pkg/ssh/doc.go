// Package ssh is the shell of CosmicAC: an SSH server for an agent and an SSH
// client for the command line and the browser bridge, each over a connection
// that somebody else made and authenticated.
//
// The mesh has proven who the client is and its grant says what it may do, so
// the server asks for no password and no key. The list of rights decides which
// channels and requests are answered: "shell" for a shell or a command with a
// terminal of its own, "exec" for commands, "files" for SFTP, "forward" for TCP
// connections made from inside the VM. Everything else is refused: agent and
// X11 forwarding, remote listeners, unix sockets, tunnels.
//
// The other way round, the client knows the server by its host key, which comes
// from the agent's signed card; a server with another key is refused.
//
// It does not dial, does not check grants, does not know the mesh, does not use
// PAM, does not write utmp or lastlog, and does not keep a session when its
// connection is lost: a multiplexer such as tmux inside the VM does that.
package ssh
