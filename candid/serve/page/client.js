// Questions to this server, with the token if it needs one.

let token = ""; // in memory alone
let served = ""; // the model that is asked, if there are several

export const setServed = (name) => { served = name; };
const OF_ALL = /^\/(healthz|v1\/(models|verdicts|example|picture))/;
const withModel = (path) => (served && !OF_ALL.test(path) ? `${path}${path.includes("?") ? "&" : "?"}model=${encodeURIComponent(served)}` : path);

export const hasToken = () => token !== "";
export const setToken = (given) => { token = given; };

export async function ask(path, options = {}) {
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  let response;
  try {
    response = await fetch(`.${withModel(path)}`, { ...options, headers }); // relative: a proxy may serve it at a sub-path
  } catch {
    throw Object.assign(new Error("The server does not answer: is it still running?"), { gone: true });
  }
  if (response.status === 401) {
    const wrong = token !== "";
    token = "";
    throw Object.assign(new Error("This server needs a token."), { needsToken: true, wrong });
  }
  if (!response.ok) {
    const { error } = await response.json().catch(() => ({}));
    throw Object.assign(new Error(error || "The server sent an unreadable answer."), { status: response.status });
  }
  return response;
}

export async function api(path, options) {
  return (await ask(path, options)).json().catch(() => { throw new Error("The server sent an unreadable answer."); });
}

// A body with fields; a list is a field that comes several times.
export function formFields(fields) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) for (const one of [value].flat()) form.append(name, one);
  return form;
}

// A body with files and other fields.
export function formOf(files, fields = {}) {
  const form = new FormData();
  for (const file of files) form.append("file", file, file.name || "pasted");
  for (const [name, value] of Object.entries(fields)) form.append(name, value);
  return form;
}
