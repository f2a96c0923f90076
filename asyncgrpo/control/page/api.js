// The admin API, asked with the run's token. The token comes in the fragment of the address, which no browser sends and no
// server logs; it is kept for this tab and taken out of the address bar.

const KEY = "asyncgrpo token";

function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem(KEY, given);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem(KEY) ?? "";
}

let token = takeToken();
addEventListener("hashchange", () => { token = takeToken(); });

/** An error with the status of the reply; 0: there was none. */
export class Failed extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

async function ask(path, options) {
  let reply;
  try {
    reply = await fetch(path, {...options, headers: {...options?.headers, Authorization: `Bearer ${token}`}});
  } catch {
    throw new Failed(0, "the run's driver does not reply: it has ended, or this machine cannot reach it");
  }
  const said = await reply.json().catch(() => ({error: `the reply was ${reply.status}`}));
  if (!reply.ok) throw new Failed(reply.status, said.error);
  return said;
}

/** The reply to GET, with parameters that are empty left out. */
export function get(path, parameters = {}) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== "" && value != null));
  return ask(query.size ? `${path}?${query}` : path);
}

/** What was done, in a sentence. */
export async function tell(command) {
  const options = {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(command)};
  return (await ask("/api/command", options)).done;
}
