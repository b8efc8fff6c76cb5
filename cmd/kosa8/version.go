package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/warren-vm/warren/internal/cli"
	"github.com/warren-vm/warren/internal/guestapi"
)

// versionInfo is what `kosa8 version --json` prints.
type versionInfo struct {
	Version string `json:"version"`
	// Commit is the source it was built from; Modified says that it was not
	// exactly that.
	Commit   string `json:"commit,omitempty"`
	Modified bool   `json:"modified,omitempty"`
	// Protocol is the version of the calls between host and guest.
	Protocol int    `json:"protocol"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func currentVersion() versionInfo {
	v := versionInfo{
		Version:  cli.Version,
		Protocol: guestapi.Protocol,
		Go:       runtime.Version(),
		Platform: runtime.GOOS + "/" + runtime.GOARCH,
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				v.Commit = s.Value
			case "vcs.modified":
				v.Modified = s.Value == "true"
			}
		}
	}
	return v
}

func newVersion(s streams) *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "version",
		Short: "Say which version this is",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			v := currentVersion()
			if asJSON {
				return cli.PrintJSON(s.out, v)
			}
			commit := ""
			if v.Commit != "" {
				commit = ", commit " + v.Commit[:min(12, len(v.Commit))]
				if v.Modified {
					commit += " with changes"
				}
			}
			_, err := fmt.Fprintf(s.out, "kosa8 %s (protocol %d, %s, %s%s)\n", v.Version, v.Protocol, v.Platform, v.Go, commit)
			return err
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print as JSON")
	return c
}
