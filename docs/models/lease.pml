/* Leases and lag, small enough to look at every order of events. docs/simulation.md says what comes out.
 *
 * Two generators answer N prompts, the learner trains P groups a step, and no token of a step may be older than L
 * versions. The rule for taking a batch is that of asyncgrpo/buffer/admission.py, the transitions are buffer.py's:
 *
 *     WAITING -> LEASED -> READY -> TAKEN -> DONE        expired or released: WAITING again, under another attempt
 *
 * A generator samples the first token of a group with the weights that it serves at that moment; that version travels
 * with the group. The learner trains on while its weights travel: they reach generators one by one, each when it likes,
 * and may be overtaken by later ones. Who serves older weights than the learner's may begin fewer groups. A generator may die or fall silent: its leases are released, and what it was at may still arrive. A
 * lease may expire while its group is under way. A frame may arrive twice. Each fault has a budget, so that every
 * execution ends, and `Monitor` asks at its end whether every prompt was trained: if not, it is a deadlock.
 *
 * With -DCHANGES the bound becomes anything from 0 to L after each step, and a group keeps the bound of its lease;
 * admission wants a batch under way, or as much as there is, and that changes too.
 *
 *     spin -a -DCRASHES=1 lease.pml && gcc -w -O2 -DSAFETY -DCOLLAPSE -DCRASHES=1 -o pan pan.c && ./pan -m100000
 *
 * Planted mistakes, each found: -DTAKE_WITHOUT_RULE, -DGRANT_BEHIND, -DKEEP_TWICE (with -DCOPIES=1), -DSAME_NAME (with
 * -DCRASHES=1), and with -DCHANGES -DSLOTS_ALONE, -DFORGET_TAKEN, -DBOUND_OF_NOW, -DLESS_THAN_A_BATCH.
 * tests/simulation/test_model.py runs them.
 */

#define N 6
#ifndef P
#define P 2
#endif
#ifndef L
#define L 1
#endif
#ifndef CRASHES
#define CRASHES 0
#endif
#ifndef EXPIRIES
#define EXPIRIES 0
#endif
#ifndef COPIES
#define COPIES 0
#endif
#define SLOTS ((L + 1) * P)
#define WINDOW 2
#define ATTEMPTS (CRASHES + EXPIRIES + 1)

#define WAITING 0
#define LEASED 1
#define READY 2
#define TAKEN 3
#define DONE 4

#define NOTHING 0                       /* what a lease is to the generator that was granted it */
#define GRANTED 1
#define SAMPLED 2                       /* + version of the first token: it arrives when it likes */

byte state[N], holder[N], attempt[N], trained[N];
byte oldest[N];                         /* while leased: the version at the lease; then: of the oldest token */
byte kept[N];                           /* the bound at the lease */
byte bound = L;                         /* of the next lease */
byte wanted = N;                        /* groups under way, above which none begins */
byte has_changed;                       /* once after each step, at some time */
byte work[N * ATTEMPTS], worker[N * ATTEMPTS];
byte late[N * ATTEMPTS];                /* 1 + version: sent by a generator that was given up */
byte serves[2], held[2];
byte version;                           /* the learner's */
bool training;                          /* the step that makes the next one */
byte used, done;                        /* slots, prompts */
byte crashes = CRASHES, expiries = EXPIRIES, copies = COPIES;

/* -- the rule: of the groups in slots, count those due by version + k, and those of them that are ready ------------- */

#define UNTAKEN(i) (state[i] == LEASED || state[i] == READY)
#ifdef BOUND_OF_NOW
#define DEADLINE(i) (oldest[i] + bound)
#else
#define DEADLINE(i) (oldest[i] + kept[i])
#endif
#define DUE(i, k) (UNTAKEN(i) && DEADLINE(i) <= version + (k))
#define RIPE(i, k) (state[i] == READY && DEADLINE(i) <= version + (k))
#define SUM(F, k) (F(0, k) + F(1, k) + F(2, k) + F(3, k) + F(4, k) + F(5, k))
#define LEFT_BEHIND(k) (SUM(DUE, k) - (SUM(RIPE, k) < P -> SUM(RIPE, k) : P))
#define FITS(k) (LEFT_BEHIND(k) <= (k) * P)
#ifdef TAKE_WITHOUT_RULE
#define RULE true
#else
#define RULE (FITS(0) && FITS(1) && FITS(2))            /* more than L says nothing: the slots bound it */
#endif
#define IS_READY(i, k) (state[i] == READY)
#define IS_LEFT(i, k) (state[i] == LEASED || state[i] == WAITING)
#define ENOUGH (SUM(IS_READY, 0) >= P || (SUM(IS_READY, 0) > 0 && SUM(IS_LEFT, 0) == 0))

/* -- admission: another group may begin while fewer are held than the bound and the generator's weights allow -------- */

#define IS_TAKEN(i, k) (state[i] == TAKEN)
#ifdef FORGET_TAKEN
#define HELD (used - SUM(IS_TAKEN, 0))
#else
#define HELD used
#endif
#ifdef GRANT_BEHIND
#define BEHIND(g) 0
#else
#define BEHIND(g) (serves[g] < version -> version - serves[g] : 0)
#endif
#ifdef SLOTS_ALONE
#define ADMITS(g) (used < SLOTS)
#else
#define ADMITS(g) (HELD < (bound + 1 - BEHIND(g)) * P)  /* nobody is further behind than FLOOR lets him be */
#endif
#define IS_UNDER_WAY(i, k) UNTAKEN(i)
#define HAS_OVERTAKEN(j, i) (UNTAKEN(j) && (j) > (i))
#define IS_WANTED(i) (SUM(IS_UNDER_WAY, 0) < wanted || SUM(HAS_OVERTAKEN, i) > 0)
#ifdef LESS_THAN_A_BATCH
#define A_BATCH (P - 1)
#else
#define A_BATCH P
#endif

/* -- the buffer ------------------------------------------------------------------------------------------------------ */

#define IS_EARLIER(j, i) (state[j] == WAITING && (j) < (i))
#define IS_NEXT(i) (state[i] == WAITING && SUM(IS_EARLIER, i) == 0)
#define SERVED (serves[0] > serves[1] -> serves[0] : serves[1])
#define FLOOR(g) (serves[g] + 1 >= SERVED && serves[g] + bound >= version)
#define MAY_HAVE(g) (held[g] < WINDOW && FLOOR(g) && ADMITS(g))
#define LEASE(i) ((i) * ATTEMPTS + attempt[i])

inline grant(i, g) {
    state[i] = LEASED; holder[i] = g; oldest[i] = serves[g]; kept[i] = bound; held[g]++; used++;
    assert(used <= SLOTS);              /* never more groups than slots */
    work[LEASE(i)] = GRANTED; worker[LEASE(i)] = g
}

inline take_back(i) {                   /* its slot is free, and no late answer has the name of its next lease */
    held[holder[i]]--; used--; state[i] = WAITING; oldest[i] = 0; kept[i] = 0; holder[i] = 0; attempt[i]++;
    assert(attempt[i] < ATTEMPTS)
}

inline accept(i, a, v) {
    if
    :: state[i] == LEASED && attempt[i] == (a) ->
        state[i] = READY; held[holder[i]]--; oldest[i] = v; holder[i] = 0
#ifdef KEEP_TWICE
    :: state[i] == DONE -> state[i] = READY; used++; done--; oldest[i] = v
#endif
    :: else                             /* not wanted: its lease has ended, or the group is here */
    fi
}

proctype Prompt(byte me) {
end:
    do
    :: atomic { IS_NEXT(me) && IS_WANTED(me) && MAY_HAVE(0) -> grant(me, 0) }
    :: atomic { IS_NEXT(me) && IS_WANTED(me) && MAY_HAVE(1) -> grant(me, 1) }
    :: atomic { expiries > 0 && state[me] == LEASED -> expiries--; take_back(me) }
    od
}

/* -- the generators: each lease by itself ---------------------------------------------------------------------------- */

proctype Lease(byte i; byte a) {
    byte v;
end:
    do
    :: atomic { work[i * ATTEMPTS + a] == GRANTED -> work[i * ATTEMPTS + a] = SAMPLED + serves[worker[i * ATTEMPTS + a]] }
    :: atomic { work[i * ATTEMPTS + a] >= SAMPLED ->
        v = work[i * ATTEMPTS + a] - SAMPLED;
        if
        :: work[i * ATTEMPTS + a] = NOTHING; worker[i * ATTEMPTS + a] = 0
        :: copies > 0 -> copies--
        fi;
        accept(i, a, v); v = 0 }
    :: atomic { late[i * ATTEMPTS + a] > 0 ->
        v = late[i * ATTEMPTS + a] - 1; late[i * ATTEMPTS + a] = 0;
        accept(i, a, v); v = 0 }
    od
}

proctype Generator(byte me) {
    byte i, x;
    bool arrives;
end:
    do
    :: atomic { serves[me] < version -> serves[me] = version }
    :: atomic { crashes > 0 -> crashes--;       /* another one takes its place, with the newest weights */
        if :: arrives = true :: arrives = false fi;
        for (x : 0 .. N * ATTEMPTS - 1) {
            if
            :: work[x] != NOTHING && worker[x] == me ->
                if :: work[x] >= SAMPLED && arrives -> late[x] = work[x] - SAMPLED + 1 :: else fi;
                work[x] = NOTHING; worker[x] = 0
            :: else
            fi
        }
        for (i : 0 .. N - 1) {
            if
            :: state[i] == LEASED && holder[i] == me ->
                take_back(i)
#ifdef SAME_NAME
                ; attempt[i]--
#endif
            :: else
            fi
        }
        i = 0; x = 0; arrives = false; serves[me] = version }
    od
}

/* -- the learner ----------------------------------------------------------------------------------------------------- */

#define COMES_FIRST(i, j) (DEADLINE(i) < DEADLINE(j))

proctype Learner() {
    byte i, n, best;
end:
    do
    :: atomic { !training && ENOUGH && RULE ->
        n = 0;
        do
        :: n < P && SUM(IS_READY, 0) > 0 ->      /* what is due first, and of these the first in the prompts' order */
            best = N;
            for (i : 0 .. N - 1) {
                if
                :: state[i] == READY && (best == N || COMES_FIRST(i, best)) -> best = i
                :: else
                fi
            }
            assert(oldest[best] <= version && version - oldest[best] <= kept[best]);    /* no token is too old */
            state[best] = TAKEN; trained[best]++; n++;
            assert(trained[best] == 1)                                          /* and none is trained twice */
        :: else -> break
        od;
        i = 0; n = 0; best = 0; training = true }
    :: atomic { training ->
        training = false; version++;
        for (i : 0 .. N - 1) {
            if :: state[i] == TAKEN -> state[i] = DONE; oldest[i] = 0; kept[i] = 0; used--; done++ :: else fi
        }
        i = 0 }
#ifdef CHANGES
    :: atomic { has_changed < version -> has_changed++;      /* leases of one version may have two bounds */
        select(bound : 0 .. L);
        if :: wanted = A_BATCH :: wanted = N fi }
#endif
    od
}

proctype Monitor() {
    timeout -> assert(done == N)                /* nothing can happen any more, and every prompt is trained */
}

init {
    byte i, a;
    atomic {
        for (i : 0 .. N - 1) {
            run Prompt(i);
            for (a : 0 .. ATTEMPTS - 1) { run Lease(i, a) }
        }
        run Generator(0); run Generator(1); run Learner(); run Monitor()
    }
}
