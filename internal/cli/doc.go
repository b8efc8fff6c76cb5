// Package cli is what Warren's commands share, so that all of them speak
// alike: how an error looks and which exit code it gives (errors.go), what is
// shown while something takes its time (progress.go), tables (table.go),
// bars (chart.go), JSON (json.go), sizes on the command line (size.go), and
// the terminal, streams and signals of a program that runs in a guest
// (attach.go).
//
// Two rules hold everywhere. Standard output carries what was asked for and
// nothing else; whatever is said about it goes to standard error. And nothing
// is drawn, coloured or overwritten unless the stream is a terminal.
package cli
