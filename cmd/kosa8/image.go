package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/warren-vm/warren/internal/cli"
	"github.com/warren-vm/warren/internal/guestimage"
	"github.com/warren-vm/warren/internal/store"
)

func newImage(s streams) *cobra.Command {
	c := &cobra.Command{
		Use:   "image",
		Short: "Build and verify the guest image",
		Long: `The guest image is what every VM boots: Debian's own kernel, an initramfs with
the agent, and a read-only root disk made from Debian's packages.`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },

		DisableFlagsInUseLine: true,
	}
	c.AddCommand(newImageBuild(s), newImageVerify(s), newImagePath(s))
	return c
}

func newImageBuild(s streams) *cobra.Command {
	var quiet, verbose, asJSON bool
	var o guestimage.Options
	c := &cobra.Command{
		Use:   "build",
		Short: "Build the guest image from this host's package sources",
		Long: `Build the guest image as an ordinary user, from the package sources this host
has, and put it in the place of the one in use. VMs that run keep theirs. A
build that fails or is interrupted leaves the one in use as it was. Older ones
go unless a VM or a snapshot needs them. Packages are fetched only when there
are none yet or their list has changed.`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if verbose {
				o.Log = s.err
			}
			return imageBuild(c.Context(), s, o, quiet, asJSON)
		},
	}
	c.Flags().Var(text(&o.GuestBinary, "path", ""), "agent", "where warren-guest is (default: beside kosa8)")
	c.Flags().BoolVar(&o.Fresh, "fresh", false, "fetch today's packages anew")
	c.Flags().BoolVar(&verbose, "verbose", false, "show what the tools print")
	c.Flags().BoolVarP(&quiet, "quiet", "q", false, "no progress")
	c.Flags().BoolVar(&asJSON, "json", false, "print the image as JSON")
	return c
}

// imageInfo is what the image commands print with --json.
type imageInfo struct {
	ImageID string `json:"image_id"`
	Path    string `json:"path"`
}

func imageBuild(ctx context.Context, s streams, o guestimage.Options, quiet, asJSON bool) error {
	home, err := homeOf("")
	if err != nil {
		return err
	}
	o.Home = home.Dir()
	if o.GuestBinary == "" {
		if o.GuestBinary, err = besideUs("warren-guest"); err != nil {
			return err
		}
	}
	defer sweepAside(home)()
	o.Keep = keepImages(home)
	ctx, signals := cli.CatchInterrupts(ctx)
	defer signals.Stop()
	progress := cli.NewProgress(s.err, quiet, cli.PlainLines)
	defer progress.Done()
	o.Progress = func(step string) { progress.Step("%s", step) }
	image, err := guestimage.Build(ctx, o)
	progress.Done()
	if err != nil {
		return because(ctx, store.WithRemedy(err))
	}
	if asJSON {
		return cli.PrintJSON(s.out, imageInfo{image.Manifest.ImageID, image.Dir})
	}
	_, err = fmt.Fprintf(s.out, "guest image %s is in use\n  %s\n", image.Manifest.ImageID, image.Dir)
	return err
}

func newImageVerify(s streams) *cobra.Command {
	var quiet, asJSON bool
	c := &cobra.Command{
		Use:   "verify",
		Short: "Compute the digests of the guest image anew",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			home, err := homeOf("")
			if err != nil {
				return err
			}
			ctx, signals := cli.CatchInterrupts(c.Context())
			defer signals.Stop()
			progress := cli.NewProgress(s.err, quiet, cli.Silent)
			defer progress.Done()
			err = guestimage.Verify(ctx, home.Dir(), func(step string) { progress.Step("%s", step) })
			progress.Done()
			if err != nil {
				return because(ctx, err)
			}
			image, err := guestimage.Open(home.Dir())
			if err != nil {
				return err
			}
			if asJSON {
				return cli.PrintJSON(s.out, imageInfo{image.Manifest.ImageID, image.Dir})
			}
			_, err = fmt.Fprintf(s.out, "guest image %s is as it was built\n", image.Manifest.ImageID)
			return err
		},
	}
	c.Flags().BoolVarP(&quiet, "quiet", "q", false, "no progress")
	c.Flags().BoolVar(&asJSON, "json", false, "print the image as JSON")
	return c
}

func newImagePath(s streams) *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "path",
		Short: "Say where the guest image in use is",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			home, err := homeOf("")
			if err != nil {
				return err
			}
			image, err := guestimage.Open(home.Dir())
			if err != nil {
				return err
			}
			if asJSON {
				return cli.PrintJSON(s.out, imageInfo{image.Manifest.ImageID, image.Dir})
			}
			_, err = fmt.Fprintln(s.out, image.Dir)
			return err
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print as JSON")
	return c
}

// besideUs is the path of a program that is installed with this one.
func besideUs(name string) (string, error) {
	exe, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find %s: %w", name, err)
	}
	path := filepath.Join(filepath.Dir(exe), name)
	if _, err := os.Stat(path); err != nil {
		if errors.Is(err, os.ErrNotExist) {
			err = fmt.Errorf("%s is not beside %s; build it with `make build`, or name it with --agent", name, exe)
		}
		return "", err
	}
	return path, nil
}
