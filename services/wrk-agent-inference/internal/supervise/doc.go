// Package supervise keeps one engine running: it starts the engine as the leader
// of a process group that dies with the agent, judges by real tokens whether it
// serves, and after its end makes sure that nothing of it is left before it
// starts the next.
//
// Ready means that the engine answered one token. It stops being ready when no
// token was made and none came back for a minute although one was asked for, and
// is ready again when one does. An engine that ends is started again after a
// pause that doubles; one that never became ready in five tries is given up.
//
// It does not know what kind of engine it is beyond the OpenAI surface, passes
// no requests on (see package front), and starts no group over several nodes.
package supervise
