// Package guestapi is what the host and the guest agent say to each other
// over the link: plain HTTP/1.1 with JSON, one call per request, on the
// streams that package link provides. It holds types and pure functions
// alone, so host and guest may both import it.
//
// Three kinds of calls exist:
//
//   - A Call takes one JSON document and answers with one (POST). The table of
//     calls below is the only place where a path, a size limit or a deadline
//     of one is written.
//   - A transfer (file and tar) carries a body of any length in one direction.
//     Its parameters travel in the query.
//   - Exec is answered with 101 and from then on both ends speak Frames.
//
// Everything the guest says is hostile: the host decodes with Decode, which
// bounds and refuses what it does not know, and reads frames with ReadFrame,
// which bounds before it allocates.
package guestapi
