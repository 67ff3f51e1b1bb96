"""Every request and answer between workers, as frozen dataclasses. Their wire form is in `aiograd.coordination.message_form`.

`fields`    types of fields that several messages have
`passes`    backward passes and contexts
`calls`     function calls, values for objects, messages to many workers
`groups`    groups of workers
`requests`  the table of all requests by kind

Every request is answered once, with a value of its type of answers or with an error; the session ensures that (see `rpc.session`).
"""
