// Questions to this server, with the token if it needs one.

let token = ""; // in memory alone

export const hasToken = () => token !== "";
export const setToken = (given) => { token = given; };

export async function ask(path, options = {}) {
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch {
    throw new Error("The server does not answer: is it still running?");
  }
  if (response.status === 401) {
    const wrong = token !== "";
    token = "";
    throw Object.assign(new Error("This server needs a token."), { needsToken: true, wrong });
  }
  if (!response.ok) throw new Error((await response.json().catch(() => ({}))).error || "The server sent an unreadable answer.");
  return response;
}

export async function api(path, options) {
  return (await ask(path, options)).json().catch(() => { throw new Error("The server sent an unreadable answer."); });
}
