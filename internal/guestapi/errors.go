package guestapi

// Error is how a call is refused: HTTP status 4xx or 5xx with this as body.
type Error struct {
	Code    Code   `json:"code"`
	Message string `json:"message"`
}

// Code is a stable word that callers decide on.
type Code string

// The codes. They are also the whole list a host accepts from a guest; any
// other is read as CodeInternal.
const (
	CodeBadRequest    Code = "bad_request"    // 400: malformed or out of range
	CodeNotFound      Code = "not_found"      // 404: no such file, program, user or exec
	CodeNotExecutable Code = "not_executable" // 403: exists but cannot be run
	CodeNotPrepared   Code = "not_prepared"   // 409: before Prepare, or after it or Renew failed
	CodeConflict      Code = "conflict"       // 409: exec id in use, prepared twice, frozen or not frozen
	CodeTooMany       Code = "too_many"       // 429: more runs than the agent keeps
	CodeNoSpace       Code = "no_space"       // 507: disk full in the guest
	CodeInternal      Code = "internal"       // 500: anything else
)

func (e *Error) Error() string { return e.Message }

// HTTPStatus is the status that goes with a code.
func (c Code) HTTPStatus() int {
	switch c {
	case CodeBadRequest:
		return 400
	case CodeNotFound:
		return 404
	case CodeNotExecutable:
		return 403
	case CodeNotPrepared, CodeConflict:
		return 409
	case CodeTooMany:
		return 429
	case CodeNoSpace:
		return 507
	default:
		return 500
	}
}
