//go:build race

package server

// underRace says that memory is not what it is otherwise: the race detector
// multiplies it.
const underRace = true
